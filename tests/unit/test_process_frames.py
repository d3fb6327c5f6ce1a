"""Frames and messages: whole, bounded, and unmoved by whatever bytes arrive."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxbatch.engine.snapshot import ModelFacts, PoolState, Snapshot, StepMark
from mlxbatch.errors import RequestError
from mlxbatch.process import frames
from mlxbatch.process.messages import (
    Accepted,
    Delta,
    Deltas,
    Hello,
    Ping,
    SnapshotFrame,
    Submit,
    Timing,
    params_from_wire,
    params_to_wire,
)
from mlxbatch.request import OutputDelta, RequestTiming, SamplingParams, TokenLogprob


@given(st.lists(st.integers(0, 2**31), max_size=20), st.lists(st.integers(1, 50), max_size=40))
def test_messages_survive_any_cutting(calls: list[int], cuts: list[int]) -> None:
    data = b"".join(frames.encode(Ping(call=call)) for call in calls)
    reader = frames.client_frames()
    read: list[Ping] = []
    position = 0
    for cut in [*cuts, len(data)]:
        read += reader.feed(data[position : position + cut])  # type: ignore[arg-type]
        position += cut
    assert [ping.call for ping in read] == calls
    assert reader.buffered == 0


@given(st.binary(max_size=400))
def test_random_bytes_give_messages_or_a_frame_error(data: bytes) -> None:
    reader = frames.client_frames()
    try:
        list(reader.feed(data))
    except frames.FrameError:
        return
    assert reader.buffered <= frames.HELLO_FRAME + frames.HEADER.size


@given(st.binary(max_size=200))
def test_random_payloads_in_whole_frames_give_messages_or_a_frame_error(payload: bytes) -> None:
    reader = frames.client_frames()
    try:
        list(reader.feed(frames.HEADER.pack(len(payload)) + payload))
    except frames.FrameError:
        return


def test_a_valid_frame_with_one_byte_changed_never_raises_anything_else() -> None:
    generator = random.Random(0)
    submit = Submit(request_id="r", messages=[{"role": "user", "content": "hi"}], params={"stop": ["x"]})
    frame = frames.encode(submit)
    for _ in range(3000):
        data = bytearray(frame)
        data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            list(frames.client_frames().feed(bytes(data)))
        except frames.FrameError:
            continue


def test_deep_nesting_is_refused() -> None:
    depth = 100_000
    payload = b"\x82\xa4type\xa6submit\xa6params\x81\xa1x" + b"\x91" * depth + b"\xc0"
    reader = frames.client_frames(frames.MAX_FRAME)
    with pytest.raises(frames.FrameError):
        list(reader.feed(frames.HEADER.pack(len(payload)) + payload))


def test_a_frame_over_the_limit_is_refused_before_it_is_buffered() -> None:
    reader = frames.client_frames()
    with pytest.raises(frames.FrameError, match="over the limit"):
        list(reader.feed(frames.HEADER.pack(frames.HELLO_FRAME + 1)))
    reader.limit = frames.MAX_FRAME
    assert list(frames.client_frames(frames.MAX_FRAME).feed(frames.HEADER.pack(frames.HELLO_FRAME + 1))) == []


def test_what_cannot_be_sent_says_so() -> None:
    with pytest.raises(frames.FrameError, match="Submit"):
        frames.encode(Submit(request_id="x", params={"seed": 2**80}))
    with pytest.raises(frames.FrameError, match="over the limit"):
        frames.encode(Submit(request_id="x", prompt="x" * (frames.MAX_FRAME + 1)))


def test_hello_keeps_its_names_for_ever() -> None:
    raw = msgspec.msgpack.decode(frames.encode(Hello(protocol=7, version="1.2"))[4:])
    assert raw == {"type": "hello", "protocol": 7, "version": "1.2"}


def test_unknown_fields_are_ignored() -> None:
    payload = msgspec.msgpack.encode({"type": "ping", "call": 3, "news": [1]})
    (message,) = frames.client_frames().feed(frames.HEADER.pack(len(payload)) + payload)
    assert message == Ping(call=3)


def test_snapshots_and_deltas_come_back_equal() -> None:
    snapshot = Snapshot(
        model=ModelFacts(name="m"),
        pools=(PoolState(total_blocks=10, runs=((-5, 1), (0, 4), (-2, 5))),),
        steps=(StepMark(1, 200, 3, 1, 0.2, 7.5, True),),
    )
    logprobs = (TokenLogprob(1, -0.5, ((1, -0.5), (9, -3.0))), TokenLogprob(2, 0.0))
    delta = OutputDelta("r", 1, (1, 2), "text", logprobs, "stop", 7, None, 16)
    timing = RequestTiming("c1/r", 1.0, 2.0, 3.0, 4.0, 5, 6, 7, 8)
    sent = [
        SnapshotFrame(snapshot=snapshot),
        Deltas(deltas=[Delta.from_output(delta, "r")], timings=[Timing.from_timing(timing, "r")]),
        Accepted(request_id="r", prompt_token_ids=[1]),
    ]
    read = list(frames.engine_frames().feed(b"".join(map(frames.encode, sent))))
    assert read == sent
    assert isinstance(read[1], Deltas)
    assert read[1].deltas[0].to_output() == delta
    assert read[1].timings[0].to_timing() == RequestTiming("r", 1.0, 2.0, 3.0, 4.0, 5, 6, 7, 8)


def test_sampling_parameters_cross_the_wire_unchanged() -> None:
    params = SamplingParams(
        n=2, temperature=0.5, stop=["a", "b"], stop_token_ids=[5], logit_bias={7: -1.5}, logprobs=2, max_tokens=None
    )
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(params_to_wire(params)))
    assert params_from_wire(wire) == params
    assert params_to_wire(SamplingParams()) == {}


@pytest.mark.parametrize("values", [{"n": 0}, {"n": "1"}, {"no_such": 1}, {"logit_bias": {"x": 1}}, {"stop": 5}])
def test_wrong_sampling_parameters_are_request_errors(values: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        params_from_wire(values)
