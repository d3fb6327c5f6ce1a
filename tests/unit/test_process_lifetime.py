"""An engine process from its socket to its end: private, loading, failing, shut down, idle, keeping the Mac awake."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from process_harness import Gate, ServerThread, WireClient, ask, runtime_in, serving, text_of
from scripted_process_engine import Script, ScriptedEngine

from mlxbatch.errors import EngineError, UsageError
from mlxbatch.process.link import connect_socket, handshake, hello
from mlxbatch.process.messages import (
    Accepted,
    CallFailed,
    Loading,
    Ping,
    Pong,
    Refused,
    Shutdown,
    Stopping,
    Welcome,
)


def test_socket_and_directory_are_private(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.wire()
        assert stat.S_IMODE(server.paths.socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(server.paths.directory.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.paths.record.stat().st_mode) == 0o600


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    runtime = runtime_in(tmp_path)
    runtime.engine("test").socket.write_text("left over")
    with serving(tmp_path) as server:
        server.wire().close()


def test_loading_is_reported_then_welcome(tmp_path: Path) -> None:
    load = threading.Event()

    def factory(progress):  # type: ignore[no-untyped-def]
        progress("downloading", 1, 3)
        progress("reading weights", 1, 2)
        assert load.wait(30)
        return ScriptedEngine()

    with serving(tmp_path, factory=factory) as server:
        sock = connect_socket(server.paths.socket)
        assert sock is not None
        stages: list[str] = []

        def on_loading(message: Loading) -> None:
            stages.append(message.text)
            if message.stage == "reading weights":
                load.set()

        link = handshake(sock, hello("chat"), on_loading)
        assert stages[-1] == "reading weights 50 %" and link.welcome.model == "scripted"
        link.close()


@pytest.mark.parametrize("error", [EngineError("not enough memory"), UsageError("no such model")])
def test_a_model_that_cannot_load_is_told_to_everyone_who_waits(tmp_path: Path, error: Exception) -> None:
    load = threading.Event()

    def factory(progress):  # type: ignore[no-untyped-def]
        assert load.wait(30)
        raise error

    with serving(tmp_path, factory=factory) as server:
        clients = [WireClient(server.paths.socket) for _ in range(2)]
        for client in clients:
            client.send(hello("chat"))
            client.until(Loading)
        load.set()
        for client in clients:
            refused = client.until(Refused)
            assert isinstance(refused, Refused) and refused.message == str(error)
            assert refused.exit_code == error.exit_code  # type: ignore[attr-defined]
        assert server.wait() == 1
        assert not server.paths.socket.exists() and not server.paths.record.exists()


def test_an_engine_that_fails_says_why_before_it_ends(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("[metal] command buffer failed")

    with serving(tmp_path, engine=ScriptedEngine(Script(on_step=fail))) as server:
        client = server.wire()
        client.send(ask("one"))
        stopping = client.until(Stopping)
        assert isinstance(stopping, Stopping) and stopping.reason == "error"
        assert "command buffer failed" in stopping.message
        assert server.wait() == 1 and server.engine.closed


def test_shutdown_is_refused_while_others_use_the_engine(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        chat, control = server.wire("chat"), server.wire("control")
        control.send(Shutdown(call=1))
        failed = control.until(CallFailed)
        assert isinstance(failed, CallFailed) and failed.code == "busy" and "1 clients" in failed.message
        control.send(Shutdown(call=2, force=True))
        control.until(Pong)
        stopping = chat.until(Stopping)
        assert isinstance(stopping, Stopping) and stopping.reason == "asked"
        assert server.wait() == 0 and server.engine.closed


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_idle_exit_counts_from_the_last_client(tmp_path: Path) -> None:
    clock = FakeClock()
    gate = Gate()
    server = ServerThread(
        runtime_in(tmp_path), engine=ScriptedEngine(Script(on_step=gate)), idle_exit=1800.0, clock=clock
    )
    client = server.wire("run", session="job")
    watcher = server.wire("control")  # asks about the engine, does not use it
    clock.now += 10_000
    server.on_loop(server.server.tick)
    client.send(ask("left", max_tokens=3, orphan="continue"))
    client.until(Accepted)
    client.close()
    while server.on_loop(lambda: len(server.server._clients)) > 1:
        pass
    clock.now += 10_000
    server.on_loop(server.server.tick)  # a request goes on, so it stays
    assert server.on_loop(lambda: server.server._table.num_unfinished) == 1
    gate.open()
    while server.on_loop(lambda: server.server._table.num_unfinished):
        pass
    server.on_loop(server.server.tick)
    clock.now += 1799
    server.on_loop(server.server.tick)
    record = server.registry.read(server.paths)
    assert server.code is None
    watcher.send(Ping(call=1))
    watcher.until(Pong)
    clock.now += 1
    server.on_loop(server.server.tick)
    stopping = watcher.until(Stopping)
    assert isinstance(stopping, Stopping) and stopping.reason == "idle"
    assert server.wait() == 0
    assert record is None  # nobody holds the lock in this test, so the record counts as dead


def test_an_engine_whose_socket_was_removed_ends_when_unused(tmp_path: Path) -> None:
    clock = FakeClock()
    server = ServerThread(runtime_in(tmp_path), clock=clock)
    client = server.wire()
    os.utime(server.paths.socket, (0, 0))
    clock.now += 3601
    server.on_loop(server.server.tick)
    assert server.paths.socket.stat().st_mtime > 0
    server.paths.socket.unlink()
    clock.now += 1
    server.on_loop(server.server.tick)
    client.send(ask("one"))
    assert client.answers(1)["one"][0] == text_of("hello")  # who is in may stay
    client.close()
    while server.on_loop(lambda: len(server.server._clients)):
        pass
    server.on_loop(server.server.tick)
    clock.now += 1
    server.on_loop(server.server.tick)
    assert server.wait() == 0


def test_the_mac_is_kept_awake_while_requests_exist(tmp_path: Path) -> None:
    from mlxbatch.process.awake import Awake

    class Process:
        ended = False

        def terminate(self) -> None:
            self.ended = True

        def wait(self) -> int:
            return 0

    started: list[tuple[list[str], Process]] = []

    def spawn(command):  # type: ignore[no-untyped-def]
        started.append((list(command), Process()))
        return started[-1][1]

    gate = Gate()
    awake = Awake(platform="darwin", spawn=spawn)
    with serving(tmp_path, engine=ScriptedEngine(Script(on_step=gate)), awake=awake) as server:
        client = server.wire()
        server.on_loop(server.server.tick)
        assert not started
        client.send(ask("one", max_tokens=5))
        client.until(Accepted)
        server.on_loop(server.server.tick)
        assert len(started) == 1
        assert started[0][0] == ["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())]
        gate.open()
        client.answers(1)
        server.on_loop(server.server.tick)
        assert started[0][1].ended and len(started) == 1


def test_welcome_carries_what_a_client_needs(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        client = WireClient(server.paths.socket)
        client.send(hello("chat"))
        welcome = client.until(Welcome)
        assert isinstance(welcome, Welcome)
        assert (welcome.model, welcome.max_model_len, welcome.vocab_size) == ("scripted", 4096, 257)
        assert welcome.eos_token_ids == [256] and welcome.engine_pid == os.getpid()
