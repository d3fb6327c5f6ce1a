"""The engine process's side of the socket, over real sockets, with a scripted engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from process_harness import Gate, WireClient, ask, serving, settle, text_of
from scripted_process_engine import Script, ScriptedEngine

from mlxbatch.process.link import hello
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
    Ping,
    Pong,
    Refused,
    RequestFailed,
    SnapshotFrame,
    SnapshotRequest,
    Stats,
    StatsRequest,
    Submit,
    Subscribe,
)


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


def test_arguments_of_a_template_may_have_any_name(tmp_path: Path) -> None:
    names: dict[str, object] = {"function": 1, "self": 2, "messages": 3, "args": 4}
    rendered = b"<function=1><self=2><messages=3><args=4><user>hi<assistant>"
    with serving(tmp_path) as server:
        client = server.wire()
        conversation = [{"role": "user", "content": "hi"}]
        client.send(
            Submit(request_id="chat", messages=conversation, template_args=names, params={"max_tokens": 3})
        )
        accepted = client.until(Accepted)
        assert isinstance(accepted, Accepted) and bytes(accepted.prompt_token_ids) == rendered
        client.send(EncodeChat(call=1, messages=conversation, template_args=names))
        encoded = client.until(Encoded)
        assert isinstance(encoded, Encoded) and bytes(encoded.token_ids) == rendered


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
