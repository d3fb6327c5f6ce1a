"""Look at the engines of this user, stop them, and have them give way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from mlxbatch.errors import EngineError, UsageError
from mlxbatch.process import frames
from mlxbatch.process.link import READ_SIZE, connect_socket, hello
from mlxbatch.process.messages import CallFailed, GiveWay, Pong, Refused, Shutdown
from mlxbatch.process.paths import EnginePaths, RuntimeDir, absolute_name, is_alive
from mlxbatch.process.registry import EngineRecord, Registry

ANSWER_SECONDS = 5.0
STOP_SECONDS = 20.0
KILL_SECONDS = 5.0


class CallRefusedError(EngineError):
    """The engine said no."""


class EngineInUseError(EngineError):
    """Others use the engine; `force` stops it all the same."""


def find_engine(records: list[EngineRecord], model: str | None) -> EngineRecord:
    """The engine of `model` (its name, path, the path's last part, or the engine's key), or the only one."""
    if not records:
        raise EngineError("no engine is running")
    if model is None:
        if len(records) > 1:
            names = ", ".join(record.model for record in records)
            raise UsageError(f"{len(records)} engines are running; name one of {names}")
        return records[0]
    wanted = {model, absolute_name(model)}
    found = [record for record in records if record.model in wanted or record.key == model]
    found = found or [record for record in records if Path(record.model).name == model]
    if not found:
        names = ", ".join(record.model for record in records)
        raise EngineError(f"no engine runs for {model}; running: {names}")
    if len(found) > 1:
        keys = ", ".join(record.key for record in found)
        raise UsageError(f"{len(found)} engines run for {model}; name one of them by its key: {keys}")
    return found[0]


def stop_engine(
    record: EngineRecord,
    runtime: RuntimeDir,
    *,
    force: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Stop an engine and wait until it is gone. One that is in use is only stopped by `force`.

    Raises EngineInUseError, or EngineError if it does not go. A forced stop of one that does not listen ends
    in SIGTERM, then SIGKILL.
    """
    paths = runtime.engine(record.key)
    # Understood before the welcome, while the model still loads.
    try:
        asked = _ask(paths, Shutdown(call=1, force=force))
    except CallRefusedError as error:
        raise EngineInUseError(f"{error}; --force stops it all the same") from None
    if not asked and not force:
        raise EngineError(
            f"the engine of {record.model} does not answer; `mlxbatch engine stop {record.model} --force` ends it"
        )
    if not asked:
        _signal(paths, record, signal.SIGTERM)
    if _wait_until_gone(paths, STOP_SECONDS, clock):
        return
    if force:
        _signal(paths, record, signal.SIGKILL)
        if _wait_until_gone(paths, KILL_SECONDS, clock):
            Registry(runtime).remove(record.key)
            return
    raise EngineError(f"the engine of {record.model} (process {record.pid}) is still there")


def ask_to_give_way(record: EngineRecord, runtime: RuntimeDir, lacking: int, *, evict: bool) -> bool:
    """Have an idle engine give up memory. False if it does not: it is in use by now, or does not answer."""
    try:
        return _ask(runtime.engine(record.key), GiveWay(call=1, bytes=lacking, evict=evict))
    except EngineError:
        return False


def _ask(paths: EnginePaths, message: Shutdown | GiveWay) -> bool:
    """False if it did not answer, or speaks another version of the protocol. Raises CallRefusedError."""
    try:
        sock = connect_socket(paths.socket)
    except EngineError:
        sock = None
    if sock is None:
        return False
    reader = frames.engine_frames()
    try:
        sock.settimeout(ANSWER_SECONDS)
        sock.sendall(frames.encode(hello("control")) + frames.encode(message))
        while data := sock.recv(READ_SIZE):
            for answer in reader.feed(data):
                if isinstance(answer, Pong):
                    return True
                if isinstance(answer, CallFailed):
                    raise CallRefusedError(answer.message)
                if isinstance(answer, Refused):
                    return False
    except (OSError, frames.FrameError):
        pass
    finally:
        sock.close()
    return False


def _signal(paths: EnginePaths, record: EngineRecord, number: signal.Signals) -> None:
    # The lock says that this very process lives: its id cannot have passed to another one.
    if is_alive(paths):
        try:
            os.kill(record.pid, number)
        except OSError as error:
            raise EngineError(f"cannot stop process {record.pid}: {error.strerror}") from None


def _wait_until_gone(paths: EnginePaths, seconds: float, clock: Callable[[], float]) -> bool:
    deadline = clock() + seconds
    while is_alive(paths):
        if clock() > deadline:
            return False
        time.sleep(0.05)
    return True
