"""A client's open connection to an engine, up to the engine's welcome."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mlxbatch import __version__
from mlxbatch.errors import EngineError, UsageError
from mlxbatch.process import frames
from mlxbatch.process.messages import (
    PROTOCOL,
    ClientKind,
    EngineMessage,
    Hello,
    Loading,
    Refused,
    Stopping,
    Welcome,
)

READ_SIZE = 256 * 2**10
SILENCE_SECONDS = 60.0  # a loading engine says something twice a second, but for long calls into libraries

OnLoading = Callable[[Loading], None]


class ConnectionLostError(EngineError):
    """The engine is gone. `stopping` is what it said, if it went on purpose; `loading`, that it was loading."""

    def __init__(self, message: str, stopping: Stopping | None = None, *, loading: bool = False) -> None:
        super().__init__(message)
        self.stopping = stopping
        self.loading = loading

    @property
    def asked(self) -> bool:
        return self.stopping is not None and self.stopping.reason == "asked"


@dataclass(slots=True)
class Link:
    """A blocking socket on which the engine has said welcome. `early` came right behind the welcome."""

    sock: socket.socket
    frames: frames.FrameReader[EngineMessage]
    welcome: Welcome
    early: list[EngineMessage] = field(default_factory=list)

    def close(self) -> None:
        self.sock.close()


def hello(kind: ClientKind, title: str = "", session: str = "") -> Hello:
    return Hello(protocol=PROTOCOL, version=__version__, kind=kind, pid=os.getpid(), title=title, session=session)


def connect_socket(path: Path) -> socket.socket | None:
    """A connected socket, or None when nobody listens at `path`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise EngineError(f"cannot reach the engine at {path}: {error.strerror or error}") from None
    return sock


def handshake(sock: socket.socket, greeting: Hello, on_loading: OnLoading | None = None) -> Link:
    """Say hello and wait until the model is loaded.

    Raises ConnectionLostError when the engine dies meanwhile, and the engine's own error when it cannot load
    the model or refuses this client.
    """
    reader = frames.engine_frames()
    sock.settimeout(SILENCE_SECONDS)
    loading = False
    try:
        sock.sendall(frames.encode(greeting))
        while True:
            data = sock.recv(READ_SIZE)
            if not data:
                raise ConnectionResetError
            messages = list(reader.feed(data))
            for index, message in enumerate(messages):
                if isinstance(message, Welcome):
                    sock.settimeout(None)
                    return Link(sock, reader, message, messages[index + 1 :])
                if isinstance(message, Refused):
                    raise (UsageError if message.exit_code == UsageError.exit_code else EngineError)(message.message)
                if isinstance(message, Stopping):
                    raise ConnectionLostError(message.message or "the engine was stopped", message)
                if isinstance(message, Loading):
                    loading = True
                    if on_loading is not None:
                        on_loading(message)
    except TimeoutError:
        sock.close()
        raise EngineError(
            f"the engine has said nothing for {SILENCE_SECONDS:.0f} s; "
            "`mlxbatch engine logs` may tell why, `mlxbatch engine stop --force` ends it"
        ) from None
    except OSError:
        sock.close()
        words = "died while it loaded the model" if loading else "ended before it answered"
        raise ConnectionLostError(f"the engine {words}", loading=loading) from None
    except BaseException:
        sock.close()
        raise
