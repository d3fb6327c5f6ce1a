"""The engine process's side of the socket, over real sockets, with a scripted engine."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from process_harness import ServerThread, WireClient, ask, runtime_in, serving
from scripted_process_engine import Script, ScriptedEngine, answer_text

from mlxbatch.errors import EngineError, UsageError
from mlxbatch.process.link import connect_socket, handshake, hello
from mlxbatch.process.messages import (
    PROTOCOL,
    Accepted,
    CallFailed,
    Cancel,
    Decode,
    Decoded,
    Deltas,
    Encode,
    EncodeChat,
    Encoded,
    Hello,
    Loading,
    Ping,
    Pong,
    Refused,
    RequestFailed,
    Shutdown,
    SnapshotFrame,
    SnapshotRequest,
    Stats,
    StatsRequest,
    Stopping,
    Submit,
    Subscribe,
    Welcome,
)


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


def test_answers_reach_the_client_that_asked(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        first, second = server.wire(), server.wire()
        for number in range(5):
            first.send(ask(f"r{number}", f"first {number}"))
            second.send(ask(f"r{number}", f"second {number}"))
        answers = first.answers(5)
        assert {name: text for name, (text, _, _) in answers.items()} == {
            f"r{number}": text_of(f"first {number}") for number in range(5)
        }
        assert all(text == text_of(f"second {name[1:]}") for name, (text, _, _) in second.answers(5).items())
        assert all(len(tokens) == 20 and last.finish_reason == "length" for _, tokens, last in answers.values())


def test_timing_comes_with_the_last_delta(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        client = server.wire()
        client.send(ask("one"))
        while True:
            message = client.until(Deltas)
            assert isinstance(message, Deltas)
            if message.deltas[0].finish_reason is not None:
                break
            assert not message.timings
        assert [(t.request_id, t.output_tokens) for t in message.timings] == [("one", 20)]


def test_messages_are_tokenised_in_the_engine(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        client = server.wire()
        client.send(Submit(request_id="chat", messages=[{"role": "user", "content": "hi"}], params={"max_tokens": 3}))
        accepted = client.until(Accepted)
        assert isinstance(accepted, Accepted)
        assert bytes(accepted.prompt_token_ids) == b"<user>hi<assistant>"
        assert accepted.num_prompt_tokens == len(b"<user>hi<assistant>")


@pytest.mark.parametrize(
    ("submit", "code"),
    [
        (Submit(request_id="x"), "invalid_request"),
        (Submit(request_id="x", messages=[]), "invalid_request"),
        (ask("x", max_tokens=5000), "context_length_exceeded"),
        (ask("x", params={"top_p": 2.0}), "invalid_request"),
        (ask("x", params={"top_pp": 1.0}), "unknown_parameter"),
        (ask("x", params={"temperature": "hot"}), "invalid_request"),
        (ask("x", priority=7), "invalid_request"),
        (ask("x", ""), "empty_prompt"),
        (ask("x", max_tokens=3, resume_token_ids=[65, 66, 67]), "invalid_request"),
    ],
)
def test_a_refused_request_names_its_code_and_harms_nobody(tmp_path: Path, submit: Submit, code: str) -> None:
    with serving(tmp_path) as server:
        client = server.wire()
        client.send(submit)
        failed = client.until(RequestFailed)
        assert isinstance(failed, RequestFailed)
        assert (failed.request_id, failed.code) == ("x", code)
        client.send(ask("x"))  # the id is free again
        assert client.answers(1)["x"][0] == text_of("hello")


def test_an_id_in_use_is_refused(tmp_path: Path) -> None:
    gate = Gate()
    with serving(tmp_path, engine=ScriptedEngine(Script(on_step=gate))) as server:
        client = server.wire()
        client.send(ask("same"))
        client.until(Accepted)
        client.send(ask("same"))
        failed = client.until(RequestFailed)
        assert isinstance(failed, RequestFailed) and "in use" in failed.message
        gate.open()
        assert client.answers(1)["same"][0] == text_of("hello")


def test_calls(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        client = server.wire()
        client.send(Encode(call=1, text="häh"))
        assert client.until(Encoded) == Encoded(call=1, count=4, token_ids=list("häh".encode()))
        client.send(EncodeChat(call=2, messages=[{"role": "user", "content": "x"}], count_only=True))
        assert client.until(Encoded) == Encoded(call=2, count=len("<user>x<assistant>"))
        client.send(EncodeChat(call=3, messages=[]))
        failed = client.until(CallFailed)
        assert isinstance(failed, CallFailed) and failed.call == 3 and failed.param == "messages"
        client.send(EncodeChat(call=4, messages=[{"no": "role"}]))
        failed = client.until(CallFailed)
        assert isinstance(failed, CallFailed) and failed.code == "tokenizer_error"
        client.send(Decode(call=5, token_ids=list(b"abc")))
        assert client.until(Decoded) == Decoded(call=5, text="abc")
        client.send(Ping(call=6))
        assert client.until(Pong) == Pong(call=6)
        client.send(StatsRequest(call=7))
        stats = client.until(Stats)
        assert isinstance(stats, Stats) and stats.call == 7 and stats.values["rows"] == 0


def test_cancel_ends_with_abort_and_frees_the_slot(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(Script(slots=1, on_step=gate))
    with serving(tmp_path, engine=engine) as server:
        client = server.wire()
        client.send(ask("a", max_tokens=1000))
        client.send(ask("b", max_tokens=2))
        gate.let(2)
        client.until(Deltas)
        client.send(Cancel(request_id="a"))
        settle(client)
        gate.open()
        answers = client.answers(2)
        assert answers["a"][2].finish_reason == "abort"
        assert answers["b"][0] == text_of("hello", 2)


def test_any_client_may_cancel_by_the_engine_wide_id(tmp_path: Path) -> None:
    gate = Gate()
    with serving(tmp_path, engine=ScriptedEngine(Script(on_step=gate))) as server:
        owner, other = server.wire(), server.wire("top")
        owner.send(ask("mine", max_tokens=1000))
        gate.let(1)
        owner.until(Deltas)
        other.send(SnapshotRequest(call=1))
        settle(other)
        gate.let(1)
        frame = other.until(SnapshotFrame)
        assert isinstance(frame, SnapshotFrame)
        (slot,) = frame.snapshot.slots
        assert [client.kind for client in frame.snapshot.clients] == ["chat", "top"]
        other.send(Cancel(request_id="mine"))  # not its own
        other.send(Cancel(request_id=slot.request_id, anyones=True))
        settle(other)
        gate.open()
        assert owner.answers(1)["mine"][2].finish_reason == "abort"


def test_a_dead_client_leaves_no_request_behind(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(Script(slots=2, on_step=gate))
    with serving(tmp_path, engine=engine) as server:
        dead, alive = server.wire(), server.wire()
        for number in range(6):
            dead.send(ask(f"r{number}", max_tokens=4000))
        settle(dead)
        alive.send(ask("mine"))
        alive.until(Accepted)
        dead.close()
        while server.on_loop(lambda: len(server.server._clients)) > 1:
            pass
        gate.open()
        assert alive.answers(1)["mine"][0] == text_of("hello")
        assert engine.tokens < 1000  # of 24,000 that nobody would read
        alive.send(StatsRequest(call=1))
        alive.until(Stats)
        assert not engine.running and not engine.waiting
        assert server.on_loop(lambda: server.server._table.num_unfinished) == 0


def test_a_client_that_does_not_read_neither_delays_others_nor_loses_text(tmp_path: Path) -> None:
    engine = ScriptedEngine(Script(slots=256, burst=40))
    with serving(tmp_path, engine=engine) as server:
        slow, quick = server.wire(), server.wire()
        slow.send(Subscribe(rate=4))
        for number in range(120):
            slow.send(ask(f"s{number}", f"slow {number}", max_tokens=4000))
        settle(slow)
        for number in range(20):
            quick.send(ask(f"q{number}", f"quick {number}", max_tokens=50))
            text = quick.answers(1)[f"q{number}"][0]
            assert text == text_of(f"quick {number}", 50)
        answers = slow.answers(120)
        assert all(text == text_of(f"slow {name[1:]}", 4000) for name, (text, _, _) in answers.items())


def test_a_client_that_leaves_too_much_unread_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxbatch.process.connection.STALL_BYTES", 100_000)
    monkeypatch.setattr("mlxbatch.process.connection.WRITE_HIGH", 1000)
    gate = Gate()
    engine = ScriptedEngine(Script(slots=150, burst=40, on_step=gate))
    with serving(tmp_path, engine=engine) as server:
        slow = server.wire()
        for number in range(150):
            slow.send(ask(f"s{number}", f"slow {number}", max_tokens=4000))
        settle(slow)  # the last that this client reads: no answer has begun
        gate.open()
        while server.on_loop(lambda: len(server.server._clients)):
            server.on_loop(server.server.tick)
        assert server.on_loop(lambda: server.server._table.num_unfinished) in range(151)
        quick = server.wire()
        quick.send(ask("mine"))
        assert quick.answers(1)["mine"][0] == text_of("hello")


def test_snapshots_name_requests_and_clients(tmp_path: Path) -> None:
    gate = Gate()
    with serving(tmp_path, engine=ScriptedEngine(Script(on_step=gate))) as server:
        client = server.wire("run")
        client.send(ask("one", label="q-171", max_tokens=500))
        client.until(Accepted)
        client.send(Subscribe(rate=4))
        settle(client)
        gate.let(2)
        frame = client.until(SnapshotFrame)
        assert isinstance(frame, SnapshotFrame)
        snapshot = frame.snapshot
        assert [(s.label, s.client) for s in snapshot.slots] == [("q-171", "a test")]
        assert [(c.kind, c.pid, c.requests) for c in snapshot.clients] == [("run", os.getpid(), 1)]
        client.send(Cancel(request_id="one"))
        gate.open()


def test_idle_engine_sends_a_last_snapshot_of_its_idleness(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        client = server.wire()
        client.send(Subscribe(rate=4))
        client.send(ask("one", max_tokens=200))
        client.answers(1)
        while True:
            frame = client.until(SnapshotFrame)
            assert isinstance(frame, SnapshotFrame)
            if not frame.snapshot.slots:
                break


def test_orphans_that_may_go_on_are_taken_up_by_their_session(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(Script(on_step=gate))
    with serving(tmp_path, engine=engine) as server:
        run = server.wire("run", session="job 1")
        run.send(ask("a", "orphan", max_tokens=30, orphan="continue"))
        run.send(ask("b", "lost", max_tokens=30))
        run.until(Accepted)
        run.until(Accepted)
        gate.let(3)
        run.until(Deltas)
        run.close()
        gate.open()
        stranger = server.wire("run", session="job 2")
        stranger.send(ask("a", "orphan", max_tokens=30))
        accepted = stranger.until(Accepted)
        assert isinstance(accepted, Accepted) and not accepted.adopted
        stranger.answers(1)
        heir = server.wire("run", session="job 1")
        heir.send(ask("a", "orphan", max_tokens=30, orphan="continue"))
        accepted = heir.until(Accepted)
        assert isinstance(accepted, Accepted) and accepted.adopted
        text, tokens, last = heir.answers(1)["a"]
        assert (text, len(tokens), last.finish_reason) == (text_of("orphan", 30), 30, "length")
        # Its answer has been given out, so the next one runs anew.
        heir.send(ask("a", "orphan", max_tokens=30))
        accepted = heir.until(Accepted)
        assert isinstance(accepted, Accepted) and not accepted.adopted


def test_an_orphan_with_another_prompt_is_not_taken_up(tmp_path: Path) -> None:
    gate = Gate()
    with serving(tmp_path, engine=ScriptedEngine(Script(on_step=gate))) as server:
        run = server.wire("run", session="job")
        run.send(ask("a", "before", max_tokens=1000, orphan="continue"))
        run.until(Accepted)
        run.close()
        heir = server.wire("run", session="job")
        heir.send(ask("a", "after"))
        accepted = heir.until(Accepted)
        assert isinstance(accepted, Accepted) and not accepted.adopted
        gate.open()
        assert heir.answers(1)["a"][0] == text_of("after")


def test_another_protocol_version_is_told_what_to_do(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        client = WireClient(server.paths.socket)
        client.send(Hello(protocol=PROTOCOL + 1, version="99.0"))
        refused = client.until(Refused)
        assert isinstance(refused, Refused) and refused.code == "version"
        assert "99.0" in refused.message and "mlxbatch engine stop" in refused.message
        assert client.next() is None
        server.wire().close()


def test_requests_before_hello_or_twice_hello_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        client = WireClient(server.paths.socket)
        client.send(ask("early"))
        refused = client.until(Refused)
        assert isinstance(refused, Refused) and refused.code == "protocol"
        again = server.wire()
        again.send(hello("chat"))
        refused = again.until(Refused)
        assert isinstance(refused, Refused) and refused.code == "protocol"


def test_silent_connections_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxbatch.process.connection.HELLO_SECONDS", 0.0)
    with serving(tmp_path) as server:
        client = WireClient(server.paths.socket)
        assert client.next() is None  # at the next tick


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
