"""Join the engine of a model, or start it. Any number of clients may do so at the same moment.

connect ──▶ somebody listens? ──yes──▶ hello, wait for the model, welcome
                 │ no
                 ▼
<key>.start (flock, one client at a time) ──▶ still nobody? ──▶ spawn, wait for the socket ──▶ again
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import msgspec

from mlxbatch.config import EngineConfig
from mlxbatch.errors import EngineError
from mlxbatch.process.link import ConnectionLostError, Link, OnLoading, connect_socket, handshake
from mlxbatch.process.messages import Hello
from mlxbatch.process.paths import EnginePaths, FileLock, RuntimeDir, absolute, engine_key, is_alive
from mlxbatch.process.registry import Registry

LISTEN_SECONDS = 60.0  # a Python that starts on a busy machine
ATTEMPTS = 3  # an engine may leave just as one comes
LOG_BYTES = 4 * 2**20
LOG_OF_ONE = "=== an engine is started, "  # in the log before all that one engine process writes
LOG_LINES_SHOWN = 5
LOG_LINES_SEARCHED = 300  # the stacks of all threads stand behind a fatal error


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How the engine process runs if it has to be started. `idle_exit` in seconds, None for never."""

    idle_exit: float | None = 1800.0
    allow_sleep: bool = False


Command = Callable[[EngineConfig, RuntimeDir, LaunchOptions], Sequence[str]]


def engine_command(config: EngineConfig, runtime: RuntimeDir, options: LaunchOptions) -> list[str]:
    """The command line of an engine process. -P keeps the working directory off Python's path, so that a
    folder called mlxbatch or tui there is never imported."""
    command = [sys.executable, "-P", "-m", "mlxbatch.process.main"]
    command += ["--config", msgspec.json.encode(config).decode()]
    command += ["--runtime", str(runtime.path), "--logs", str(runtime.logs)]
    command += ["--idle-exit", "never" if options.idle_exit is None else str(options.idle_exit)]
    return command + (["--allow-sleep"] if options.allow_sleep else [])


class Launcher:
    """Connects to the engine for one config. `command` makes the command line that starts it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        runtime: RuntimeDir | None = None,
        options: LaunchOptions = LaunchOptions(),
        command: Command = engine_command,
    ) -> None:
        self.config = absolute(config)
        self._runtime = runtime or RuntimeDir.of_user()
        self._options = options
        self._command = command
        self.paths = self._runtime.engine(engine_key(config))
        self.started = False  # whether this client ever started an engine, rather than joined one

    def connect(self, greeting: Hello, on_loading: OnLoading | None = None) -> Link:
        """A link to a ready engine. Raises EngineError, or the engine's error, when there will not be one."""
        lost: ConnectionLostError | None = None
        for _ in range(ATTEMPTS):
            sock = connect_socket(self.paths.socket)
            if sock is None:
                self._start()
                sock = connect_socket(self.paths.socket)
            if sock is None:
                continue
            try:
                return handshake(sock, greeting, on_loading)
            except ConnectionLostError as error:
                if error.asked:
                    raise EngineError(str(error)) from None
                lost = error
                if error.loading:
                    break  # it would die again, after as long a time
        raise self._with_log(str(lost) if lost is not None else "the engine does not stay up")

    def join(self, greeting: Hello, on_loading: OnLoading | None = None) -> Link | None:
        """A link to a running engine of the model, whatever its other settings; None if there is none."""
        others = [self._runtime.engine(r.key) for r in Registry(self._runtime).live() if r.model == self.config.model]
        for paths in [self.paths, *others]:
            sock = connect_socket(paths.socket)
            if sock is not None:
                return handshake(sock, greeting, on_loading)
        return None

    def _start(self) -> None:
        """See to it that somebody listens at the socket, whoever starts it."""
        starting = FileLock(self.paths.start_lock)
        deadline = time.monotonic() + LISTEN_SECONDS
        while not starting.try_acquire():
            if self._listening() or time.monotonic() > deadline:
                return
            time.sleep(0.05)
        try:
            while is_alive(self.paths) and time.monotonic() < deadline:
                if self._listening():
                    return
                time.sleep(0.05)  # it comes up, or is on its way out
            if not self._listening():
                self._spawn(deadline)
        finally:
            starting.release()

    def _listening(self) -> bool:
        sock = connect_socket(self.paths.socket)
        if sock is None:
            return False
        sock.close()
        return True

    def _spawn(self, deadline: float) -> None:
        with _opened(self.paths.log) as output:
            process = subprocess.Popen(
                list(self._command(self.config, self._runtime, self._options)),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # outlives this terminal
            )
        self.started = True
        threading.Thread(target=process.wait, daemon=True).start()  # no zombie if it ends before this client
        while not self._listening():
            if process.poll() is not None:
                raise self._with_log(f"the engine did not start (exit code {process.returncode})")
            if time.monotonic() > deadline:
                raise self._with_log(f"the engine did not come up within {LISTEN_SECONDS:.0f} s")
            time.sleep(0.02)

    def _with_log(self, message: str) -> EngineError:
        shown = "".join(f"\n  {line}" for line in last_words(log_tail(self.paths.log, LOG_LINES_SEARCHED)))
        return EngineError(f"{message}. The end of its log, {self.paths.log}:{shown or ' (empty)'}")


def log_tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 64 * 2**10 - 512 * lines))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def last_words(lines: list[str]) -> list[str]:
    """What the last process of a log had to say: its fatal error and the lines before it, or else its last lines."""
    starts = [index for index, line in enumerate(lines) if LOG_OF_ONE in line]  # behind the rest of a cut line, too
    lines = lines[starts[-1] + 1 :] if starts else lines
    fatal = [index for index, line in enumerate(lines) if line.startswith("Fatal Python error")]
    end = fatal[-1] + 1 if fatal else len(lines)
    return lines[max(0, end - LOG_LINES_SHOWN) : end]


def _opened(log: Path) -> FileIO:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))
        output = log.open("ab", buffering=0)
        output.write(f"{LOG_OF_ONE}{time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        return output
    except OSError as error:
        raise EngineError(
            f"cannot write the engine's log, {log}: {error.strerror or error}; make its folder writable (on Linux, "
            "XDG_STATE_HOME names another), or let `mlxbatch run` load the model in its own process with --in-process"
        ) from None


def paths_of(config: EngineConfig, runtime: RuntimeDir | None = None) -> EnginePaths:
    return (runtime or RuntimeDir.of_user()).engine(engine_key(config))
