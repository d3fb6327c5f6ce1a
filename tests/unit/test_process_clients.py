"""Both clients against a real server in this process: the EngineClient contract, and the one for interfaces."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from process_harness import ServerThread, runtime_in
from scripted_process_engine import Script, ScriptedEngine, answer_text

from mlxbatch.config import EngineConfig
from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.errors import EngineError, RequestError
from mlxbatch.models.tags import detect_tags
from mlxbatch.process.answer_format import tags_of
from mlxbatch.process.async_client import AsyncEngineClient, ClientEvent
from mlxbatch.process.client import ProcessEngine
from mlxbatch.process.launcher import Launcher
from mlxbatch.process.messages import Submit
from mlxbatch.process.status import LinkStatus
from mlxbatch.request import OutputDelta, Priority, Request, RequestTiming, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=30)


def refuse_to_start(*_: object) -> Sequence[str]:
    raise EngineError("this test starts no engine process")


class Scene:
    """A server and launchers that find it."""

    def __init__(self, folder: Path) -> None:
        self.runtime = runtime_in(folder)
        self.launcher = Launcher(EngineConfig(), runtime=self.runtime, command=refuse_to_start)
        self.engine = ScriptedEngine()
        self.server = ServerThread(self.runtime, engine=self.engine, key=self.launcher.paths.key)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.server.stop()


def request(request_id: str, prompt: str = "hello", params: SamplingParams = GREEDY, **fields: object) -> Request:
    return Request(request_id, tuple(prompt.encode()), params, **fields)  # type: ignore[arg-type]


def expected(prompt: str, length: int = 30, seed: int | None = None, index: int = 0) -> str:
    return answer_text(tuple(prompt.encode()), seed, index, length).decode(errors="replace")


def drain(engine: ProcessEngine) -> tuple[dict[tuple[str, int], str], dict[tuple[str, int], OutputDelta]]:
    """Texts and last deltas by request and output."""
    texts: dict[tuple[str, int], str] = {}
    last: dict[tuple[str, int], OutputDelta] = {}
    while engine.has_unfinished:
        for delta in engine.poll(5.0):
            key = (delta.request_id, delta.index)
            assert key not in last
            texts[key] = texts.get(key, "") + delta.text
            if delta.finish_reason is not None:
                last[key] = delta
    return texts, last


def test_the_tokenizer_of_a_client_knows_the_tags_of_the_model(scene: Scene) -> None:
    tags = detect_tags("<tool_call>", {"<think>": True, "</s>": True})
    scene.engine.tokenizer.tags = tags  # type: ignore[attr-defined]
    engine = ProcessEngine(scene.launcher)
    assert tags_of(engine.tokenizer) == tags
    assert tags.special and tags.stray == ("<think>", "</s>")
    engine.close()


def test_the_engine_client_contract(scene: Scene) -> None:
    engine = ProcessEngine(scene.launcher, kind="run", title="run:test")
    assert (engine.model_name, engine.max_model_len, engine.model_fingerprint) == ("scripted", 4096, "of a script")
    assert not engine.has_unfinished and engine.poll(0.0) == []
    for number in range(20):
        engine.submit(request(f"r{number}", f"prompt {number}"))
    engine.submit(request("two", "two", SamplingParams(temperature=0, max_tokens=30, n=2)))
    texts, last = drain(engine)
    assert texts == {(f"r{n}", 0): expected(f"prompt {n}") for n in range(20)} | {
        ("two", index): expected("two", index=index) for index in range(2)
    }
    assert all(delta.finish_reason == "length" for delta in last.values())
    assert {timing.request_id for timing in engine.pop_timings()} == {f"r{n}" for n in range(20)} | {"two"}
    assert engine.pop_timings() == []
    engine.close()


def test_the_tokenizer_is_the_engines(scene: Scene) -> None:
    engine = ProcessEngine(scene.launcher)
    tokenizer = engine.tokenizer
    assert tokenizer.encode("häh") == list("häh".encode())
    assert tokenizer.decode(list("häh".encode())) == "häh"
    assert bytes(tokenizer.encode_chat([{"role": "user", "content": "x"}])) == b"<user>x<assistant>"
    named = tokenizer.encode_chat([{"role": "user", "content": "x"}], self=1, messages=2, function=3)
    assert bytes(named) == b"<self=1><messages=2><function=3><user>x<assistant>"
    assert tokenizer.vocab_size == 257 and tokenizer.eos_token_ids == {256}
    decoder = tokenizer.stream_decoder()
    assert "".join(map(decoder.push, "h€h".encode())) + decoder.finish() == "h€h"
    with pytest.raises(RequestError) as refused:
        tokenizer.encode_chat([])
    assert refused.value.param == "messages"
    engine.close()


def test_a_request_that_can_never_fit_is_refused_at_once(scene: Scene) -> None:
    """Even while a step runs for long: the check does not wait for the engine's thread."""
    inside, go_on = threading.Event(), threading.Event()

    def step() -> None:
        inside.set()
        assert go_on.wait(30)

    scene.engine.script = Script(on_step=step)
    engine = ProcessEngine(scene.launcher)
    engine.submit(request("running"))
    assert inside.wait(30)
    with pytest.raises(RequestError, match="the context holds 4096") as refused:
        engine.submit(request("large", params=SamplingParams(max_tokens=5000)))
    assert refused.value.code == "context_length_exceeded"
    engine.submit(request("small"))
    with pytest.raises(RequestError, match="in use"):
        engine.submit(request("small"))
    go_on.set()
    texts, _ = drain(engine)
    assert set(texts) == {("running", 0), ("small", 0)}
    engine.close()


def test_a_refusal_by_the_engine_itself_ends_the_request(scene: Scene) -> None:
    def refuse(request: Request) -> None:
        raise RequestError("no room after all", code="kv_cache_exceeded")

    scene.engine.script = Script(on_submit=refuse)
    engine = ProcessEngine(scene.launcher)
    engine.submit(request("r"))
    _, last = drain(engine)
    assert last["r", 0].finish_reason == "error" and last["r", 0].error == "no room after all"
    engine.close()


def test_cancel(scene: Scene) -> None:
    engine = ProcessEngine(scene.launcher)
    engine.cancel("unknown")
    engine.submit(request("r", params=SamplingParams(temperature=0, max_tokens=4000)))
    engine.cancel("r")
    _, last = drain(engine)
    assert last["r", 0].finish_reason == "abort"
    engine.close()


def test_priority_of_the_client_goes_before_the_requests(scene: Scene) -> None:
    seen: list[Priority] = []
    scene.engine.script = Script(on_submit=lambda request: seen.append(request.priority))
    batch = ProcessEngine(scene.launcher, priority=Priority.BATCH)
    batch.submit(request("r", priority=Priority.INTERACTIVE))
    drain(batch)
    own = ProcessEngine(scene.launcher)
    own.submit(request("r", priority=Priority.INTERACTIVE))
    drain(own)
    assert seen == [Priority.BATCH, Priority.INTERACTIVE]
    batch.close()
    own.close()


def test_sampling_repeats_itself_for_a_batch(scene: Scene) -> None:
    texts = []
    for _ in range(2):
        engine = ProcessEngine(scene.launcher)
        engine.submit(request("r", params=SamplingParams(max_tokens=30)))
        texts.append(drain(engine)[0])
        engine.close()
    assert texts[0] == texts[1]


def test_stats_count_from_joining_and_snapshots_are_the_engines(scene: Scene) -> None:
    first = ProcessEngine(scene.launcher)
    first.submit(request("r"))
    drain(first)
    assert first.stats()["output_tokens"] == 30
    second = ProcessEngine(scene.launcher)
    assert second.stats()["output_tokens"] == 0
    second.submit(request("r"))
    drain(second)
    assert second.stats()["output_tokens"] == 30
    assert first.stats()["output_tokens"] == 60
    assert second.snapshot().model.name == "scripted"
    first.close()
    second.close()


def test_an_engine_stopped_by_its_user_is_not_started_again(scene: Scene) -> None:
    states: list[LinkStatus] = []
    engine = ProcessEngine(scene.launcher, on_status=states.append)
    engine.submit(request("r", params=SamplingParams(temperature=0, max_tokens=4000)))
    scene.server.stop()
    with pytest.raises(EngineError, match="stopped with 1 requests unfinished"):
        drain(engine)
    assert states[-1].state == "lost"
    assert engine.poll()[-1].finish_reason == "error"
    assert not engine.has_unfinished


def test_a_large_prompt_crosses_while_the_engine_streams(scene: Scene) -> None:
    """Neither side may wait for the other to read."""
    scene.engine.script = Script(slots=64, burst=40)
    engine = ProcessEngine(scene.launcher)
    for number in range(60):
        engine.submit(request(f"r{number}", f"{number}", SamplingParams(temperature=0, max_tokens=4000)))
    text = "x" * 3_000_000
    assert len(engine.tokenizer.encode(text)) == len(text)
    texts, _ = drain(engine)
    assert all(text == expected(name[1:], 4000) for (name, _), text in texts.items())
    engine.close()


# The client for interfaces.


def run(scene: Scene, body: Callable[[AsyncEngineClient], Awaitable[None]], **options: object) -> None:
    async def main() -> None:
        client = AsyncEngineClient(scene.launcher, **options)  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(body(client), 60)
        finally:
            await client.close()

    asyncio.run(main())


def chat(request_id: str, prompt: str = "hello", max_tokens: int = 30, **fields: object) -> Submit:
    params = {"max_tokens": max_tokens, "temperature": 0}
    return Submit(request_id=request_id, prompt=prompt, params=params, **fields)  # type: ignore[arg-type]


async def texts_of(client: AsyncEngineClient, count: int) -> tuple[dict[str, str], list[ClientEvent]]:
    texts: dict[str, str] = {}
    seen: list[ClientEvent] = []
    ended = 0
    async for event in client.events():
        seen.append(event)
        if isinstance(event, OutputDelta):
            texts[event.request_id] = texts.get(event.request_id, "") + event.text
            ended += event.finish_reason is not None
            if ended == count:
                return texts, seen
    raise AssertionError("the events ended early")


def test_tabs_stream_at_once(scene: Scene) -> None:
    async def body(client: AsyncEngineClient) -> None:
        await client.start()
        counts = await asyncio.gather(*(client.submit(chat(f"r{n}", f"tab {n}")) for n in range(8)))
        assert counts == [5] * 8
        texts, seen = await texts_of(client, 8)
        assert texts == {f"r{n}": expected(f"tab {n}") for n in range(8)}
        assert any(isinstance(event, Snapshot) for event in seen) or client.max_model_len == 4096
        assert isinstance(seen[0], LinkStatus) and seen[0].state == "ready"

    run(scene, body)


def test_submit_starts_by_itself_and_timings_arrive(scene: Scene) -> None:
    async def body(client: AsyncEngineClient) -> None:
        await client.submit(chat("r"))
        async for event in client.events():
            if isinstance(event, RequestTiming):
                assert (event.request_id, event.output_tokens) == ("r", 30)
                return

    run(scene, body, snapshots=0.0)


def test_an_interface_counts_with_template_arguments_of_any_name(scene: Scene) -> None:
    async def body(client: AsyncEngineClient) -> None:
        count = await client.count_chat([{"role": "user", "content": "x"}], self=1, messages=2)
        assert count == len("<self=1><messages=2><user>x<assistant>")

    run(scene, body)


def test_questions_of_an_interface(scene: Scene) -> None:
    async def body(client: AsyncEngineClient) -> None:
        assert await client.count_text("häh") == 4
        assert await client.count_chat([{"role": "user", "content": "x"}]) == len("<user>x<assistant>")
        with pytest.raises(RequestError):
            await client.count_chat([])
        with pytest.raises(RequestError, match="context holds"):
            await client.submit(chat("large", max_tokens=5000))
        assert (await client.stats())["rows"] == 0
        await client.submit(chat("r", max_tokens=4000))
        with pytest.raises(RequestError, match="in use"):
            await client.submit(chat("r"))
        await client.cancel(client.request_key("r"))
        _, seen = await texts_of(client, 1)
        assert isinstance(seen[-1], OutputDelta) and seen[-1].finish_reason == "abort"

    run(scene, body)


def test_a_submit_that_is_given_up_leaves_no_request(scene: Scene) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def tokenising(text: str, *, add_bos: bool = True) -> list[int]:
        inside.set()
        assert go_on.wait(30)
        return list(text.encode())

    scene.engine.tokenizer.encode = tokenising  # type: ignore[method-assign]

    async def body(client: AsyncEngineClient) -> None:
        await client.start()
        submitting = asyncio.create_task(client.submit(chat("r", max_tokens=4000)))
        assert await asyncio.to_thread(inside.wait, 30)
        submitting.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        table = scene.server.server._table
        while (await client.stats())["rows"] or scene.server.on_loop(lambda: table.num_unfinished):
            pass

    run(scene, body)


def test_a_stop_by_the_user_ends_answers_and_a_new_question_needs_a_new_engine(scene: Scene) -> None:
    async def body(client: AsyncEngineClient) -> None:
        await client.submit(chat("r", max_tokens=4000))
        await client.shut_down(force=True)
        states = []
        async for event in client.events():
            if isinstance(event, LinkStatus):
                states.append(event.state)
                if event.state == "lost":
                    break
        with pytest.raises(EngineError, match="starts no engine process"):
            await client.submit(chat("r2"))

    run(scene, body)


def test_joining_only_says_when_there_is_nothing_to_join(tmp_path: Path) -> None:
    async def main() -> None:
        launcher = Launcher(EngineConfig(), runtime=runtime_in(tmp_path), command=refuse_to_start)
        client = AsyncEngineClient(launcher, start_engine=False)
        with pytest.raises(EngineError, match="no engine runs for smollm2-135m"):
            await client.start()
        await client.close()

    asyncio.run(main())
