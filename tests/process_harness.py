"""An EngineServer on a thread of the test, and a client that speaks the wire by hand."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from scripted_process_engine import ScriptedEngine, answer_text

from mlxbatch.config import EngineConfig
from mlxbatch.errors import EngineError
from mlxbatch.process import frames
from mlxbatch.process.awake import Awake
from mlxbatch.process.driver import EngineFactory
from mlxbatch.process.launcher import Launcher, LaunchOptions
from mlxbatch.process.link import hello
from mlxbatch.process.messages import ClientKind, Delta, Deltas, EngineMessage, Message, Ping, Pong, Submit, Welcome
from mlxbatch.process.paths import EnginePaths, RuntimeDir
from mlxbatch.process.registry import Registry
from mlxbatch.process.server import EngineServer, ServeOptions

TIMEOUT = 30.0
MAIN = Path(__file__).with_name("scripted_process_main.py")


def runtime_in(folder: Path) -> RuntimeDir:
    return RuntimeDir(folder / "run", folder / "logs").prepared()


def refuse_to_start(*_: object) -> Sequence[str]:
    raise EngineError("this test starts no engine process")


class ServerThread:
    """Runs one server until `stop`."""

    def __init__(
        self,
        runtime: RuntimeDir,
        *,
        engine: ScriptedEngine | None = None,
        factory: EngineFactory | None = None,
        key: str = "test",
        idle_exit: float | None = None,
        clock: Callable[[], float] | None = None,
        awake: Awake | None = None,
    ) -> None:
        self.engine = engine or ScriptedEngine()
        self.runtime = runtime
        self.paths: EnginePaths = runtime.engine(key)
        self.registry = Registry(runtime)
        self.server = EngineServer(
            self.paths,
            factory or (lambda progress: self.engine),
            ServeOptions(model="scripted", idle_exit=idle_exit),
            self.registry,
            awake=awake or Awake(platform="linux"),
            **({"clock": clock} if clock else {}),
        )
        self.code: int | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._listening.wait(TIMEOUT)

    def _run(self) -> None:
        async def serve() -> int:
            self.loop = asyncio.get_running_loop()
            running = asyncio.create_task(self.server.run())
            while self.server._record is None and not running.done():
                await asyncio.sleep(0)
            self._listening.set()
            return await running

        self.code = asyncio.run(serve())

    def on_loop(self, function: Callable[[], object]) -> object:
        """Run `function` on the server's thread and return what it returns."""
        done = threading.Event()
        result: list[object] = []

        def call() -> None:
            result.append(function())
            done.set()

        assert self.loop is not None
        self.loop.call_soon_threadsafe(call)
        assert done.wait(TIMEOUT)
        return result[0]

    def wait(self) -> int | None:
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()
        return self.code

    def stop(self) -> int | None:
        if self._thread.is_alive() and self.loop is not None:
            self.loop.call_soon_threadsafe(self.server.stop)
        return self.wait()

    def wire(self, kind: ClientKind = "chat", session: str = "") -> WireClient:
        client = WireClient(self.paths.socket)
        client.send(hello(kind, "a test", session))
        client.until(Welcome)
        return client


@contextmanager
def serving(folder: Path, **options: object) -> Iterator[ServerThread]:
    thread = ServerThread(runtime_in(folder), **options)  # type: ignore[arg-type]
    try:
        yield thread
    finally:
        thread.stop()


class WireClient:
    """A blocking socket and the frames on it."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT)
        self.sock.connect(str(path))
        self.reader = frames.engine_frames()
        self.unread: list[EngineMessage] = []

    def send(self, message: Message) -> None:
        self.sock.sendall(frames.encode(message))

    def next(self) -> EngineMessage | None:
        """The next message; None at the end of the connection."""
        while not self.unread:
            try:
                data = self.sock.recv(65536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.unread += self.reader.feed(data)
        return self.unread.pop(0)

    def until(self, kind: type[Message]) -> EngineMessage:
        """The next message of that kind; others before it are dropped."""
        while (message := self.next()) is not None:
            if isinstance(message, kind):
                return message
        raise AssertionError(f"the connection ended before a {kind.__name__}")

    def answers(self, count: int) -> dict[str, tuple[str, list[int], Delta]]:
        """Text, tokens and last delta of `count` requests, read to their end."""
        texts: dict[str, str] = {}
        tokens: dict[str, list[int]] = {}
        ended: dict[str, Delta] = {}
        while len(ended) < count:
            message = self.until(Deltas)
            assert isinstance(message, Deltas)
            for delta in message.deltas:
                assert delta.request_id not in ended, "a delta after the last one"
                texts[delta.request_id] = texts.get(delta.request_id, "") + delta.text
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
                if delta.finish_reason is not None:
                    ended[delta.request_id] = delta
        return {name: (texts[name], tokens[name], delta) for name, delta in ended.items()}

    def close(self) -> None:
        self.sock.close()


def ask(request_id: str, prompt: str = "hello", max_tokens: int = 20, **fields: object) -> Submit:
    params = {"max_tokens": max_tokens, "temperature": 0, **fields.pop("params", {})}  # type: ignore[dict-item]
    return Submit(request_id=request_id, prompt=prompt, params=params, **fields)  # type: ignore[arg-type]


def scripted_launcher(
    runtime: RuntimeDir, config: EngineConfig | None = None, *flags: str, count: Path | None = None
) -> Launcher:
    """Starts engine processes that run scripted_process_main.py."""

    def command(config: EngineConfig, runtime: RuntimeDir, options: LaunchOptions) -> Sequence[str]:
        base = [sys.executable, str(MAIN), "--config", msgspec.json.encode(config).decode()]
        base += ["--runtime", str(runtime.path), "--logs", str(runtime.logs), *flags]
        return base + (["--count", str(count)] if count else [])

    return Launcher(config or EngineConfig(), runtime=runtime, command=command)


class Gate:
    """Holds the engine between steps until a test lets it go on."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self._open = False

    def __call__(self) -> None:
        if not self._open:
            assert self._steps.acquire(timeout=30)

    def let(self, steps: int) -> None:
        self._steps.release(steps)

    def open(self) -> None:
        self._open = True
        self._steps.release(1)


def settle(client: WireClient) -> None:
    """Messages are handled in order: once this returns, those before it are, and the engine's inbox has them."""
    client.send(Ping(call=999))
    earlier = []
    while (message := client.next()) != Pong(call=999):
        assert message is not None
        earlier.append(message)
    client.unread[:0] = earlier


def text_of(prompt: str, length: int = 20, seed: int | None = None, index: int = 0) -> str:
    return answer_text(tuple(prompt.encode()), seed, index, length).decode(errors="replace")
