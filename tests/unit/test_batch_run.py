"""Batch runs from options to exit code, on an engine without a model."""

import json
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
from fake_engine import ByteTokenizer, FakeEngine, answer_tokens
from rich.console import Console

from mlxbatch.batch import runner as runner_module
from mlxbatch.batch.dryrun import dry_run
from mlxbatch.batch.item import RequestDefaults
from mlxbatch.batch.output import OutputOptions
from mlxbatch.batch.progress import SilentReporter
from mlxbatch.batch.session import RunOptions, run_batch
from mlxbatch.config import EngineConfig
from mlxbatch.errors import EngineError, UsageError
from mlxbatch.request import OutputDelta, SamplingParams

Record = dict[str, Any]


class Bench:
    """A folder with an input and an output, and the engines that runs in it opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.input = folder / "in.jsonl"
        self.out = folder / "out.jsonl"
        self.engines: list[FakeEngine] = []
        self.notes = StringIO()
        self.tables = StringIO()
        self.config = EngineConfig()
        self.before_step: Callable[[FakeEngine], None] = lambda engine: None

    def write(self, *lines: Any) -> None:
        text = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        self.input.write_text("".join(line + "\n" for line in text))

    def options(self, **changes: Any) -> RunOptions:
        output = {
            name: changes.pop(name) for name in ("errors", "resume", "overwrite", "retry_errors") if name in changes
        }
        values: dict[str, Any] = {
            "input": str(self.input),
            "output": OutputOptions(self.out, **output),
            "config": self.config,
            "defaults": RequestDefaults(temperature=0.0),
        }
        return RunOptions(**values | changes)

    def run(self, **changes: Any) -> int:
        reporter = SilentReporter(Console(file=self.notes, width=200))
        return run_batch(self.options(**changes), self._open, reporter, Console(file=self.tables, width=120))

    def _open(self, config: EngineConfig, *, progress: object, trace: bool) -> FakeEngine:
        bench = self

        class Watched(FakeEngine):
            def poll(self, timeout: float = 0.0) -> list[OutputDelta]:
                bench.before_step(self)
                return super().poll(timeout)

        self.engines.append(Watched(config))
        return self.engines[-1]

    def records(self, path: Path | None = None) -> list[Record]:
        return [json.loads(line) for line in (path or self.out).read_text().splitlines()]

    def ids(self) -> list[Any]:
        return [record["custom_id"] for record in self.records()]

    @property
    def submitted(self) -> int:
        return sum(len(engine.submitted) for engine in self.engines)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def prompts(count: int, text: str = "prompt") -> list[Record]:
    return [{"id": n, "prompt": f"{text} {n}"} for n in range(count)]


def text_of(prompt: str, index: int = 0, **params: Any) -> str:
    tokenizer = ByteTokenizer()
    values = {"temperature": 0.0, "max_tokens": None} | params
    tokens = answer_tokens(tuple(tokenizer.encode(prompt)), SamplingParams(**values), index)
    return tokenizer.decode(tokens)


def test_every_request_gets_its_own_answer(bench: Bench) -> None:
    bench.write(*prompts(50))
    assert bench.run() == 0
    assert {record["custom_id"]: record["text"] for record in bench.records()} == {
        n: text_of(f"prompt {n}") for n in range(50)
    }
    usage = bench.records()[0]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
    assert all(engine.closed for engine in bench.engines)
    told = bench.engines[0].progress
    assert told == sorted(told) and told[-1] == (50, 50) and len(set(told)) > 2


def test_openai_lines_come_back_as_openai_batch_lines(bench: Bench) -> None:
    def line(custom_id: str, url: str, **body: Any) -> Record:
        return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"temperature": 0} | body}

    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1, "max_tokens": 2}
    bench.write(
        line("chat", "/v1/chat/completions", **chat, metadata={"k": "v"}, model="gpt-4o"),
        line("text", "/v1/completions", prompt=["one", "two"], n=2, logprobs=1, max_tokens=2),
        line("long", "/v1/completions", prompt="x" * 150, max_tokens=2),
    )
    assert bench.run() == 0
    records = {record["custom_id"]: record for record in bench.records()}
    for record in records.values():
        assert record.keys() == {"id", "custom_id", "response", "error"}
        assert record["error"] is None
        assert record["response"]["status_code"] == 200
    body = records["chat"]["response"]["body"]
    assert (body["object"], body["model"], body["metadata"]) == ("chat.completion", "smollm2-135m", {"k": "v"})
    choice = body["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"], "refusal": None}
    letters = list(choice["message"]["content"])
    top = [{"token": "a", "logprob": -0.5, "bytes": [97]}]
    assert choice["logprobs"]["content"] == [
        {"token": c, "logprob": -0.25, "bytes": [ord(c)], "top_logprobs": top} for c in letters
    ]
    body = records["text"]["response"]["body"]
    assert body["object"] == "text_completion"
    texts = [text_of(prompt, index, max_tokens=2) for prompt in ("one", "two") for index in range(2)]
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == list(enumerate(texts))
    assert body["choices"][0]["logprobs"] == {
        "tokens": list(texts[0]),
        "token_logprobs": [-0.25, -0.25],
        "top_logprobs": [{"a": -0.5}] * 2,
        "text_offset": [0, 1],
    }
    assert body["usage"]["prompt_tokens"] == 8  # each prompt counts once, whatever n
    assert body["usage"]["completion_tokens"] == 8
    cached = records["long"]["response"]["body"]["usage"]["prompt_tokens_details"]
    assert cached == {"cached_tokens": 16}
    assert "gpt-4o (1); smollm2-135m answers them" in bench.notes.getvalue()


def test_several_answers_stand_in_choices(bench: Bench) -> None:
    bench.write({"id": 1, "prompt": "x", "n": 2, "temperature": 0, "metadata": {"k": 1}})
    assert bench.run() == 0
    (record,) = bench.records()
    assert [choice["text"] for choice in record["choices"]] == [text_of("x", 0), text_of("x", 1)]
    assert record["metadata"] == {"k": 1}


def test_a_bad_line_becomes_an_error_record_and_stops_nothing(bench: Bench) -> None:
    bench.write(
        {"id": "a", "prompt": "one"},
        "{broken",
        {"id": "a", "prompt": "duplicate"},
        {"id": "b", "prompt": "x", "foo": 1},
        {"id": "c", "prompt": "x", "max_tokens": 9999},
        {"id": "d", "prompt": "BREAK"},
        {"id": "e", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"broken": True}},
        {"id": "f", "prompt": []},
        {"id": "f", "prompt": "the id of a bad line"},
        {"id": "a", "prompt": 3},
        {"id": "g", "prompt": "last"},
    )
    assert bench.run() == 1
    errors = {r["error"]["line"]: (r["custom_id"], r["error"]["code"]) for r in bench.records() if "error" in r}
    assert errors == {
        2: (None, "invalid_json"),
        3: (None, "duplicate_custom_id"),
        4: ("b", "unknown_parameter"),
        5: ("c", "context_length_exceeded"),
        6: ("d", "engine_error"),
        7: ("e", "invalid_request"),
        8: ("f", "invalid_request"),
        9: (None, "duplicate_custom_id"),
        10: (None, "invalid_request"),
    }
    assert sorted(r["custom_id"] for r in bench.records() if "error" not in r) == ["a", "g"]
    for record in bench.records():
        if "error" in record:
            assert record["error"].keys() == {"code", "message", "param", "line"}


def test_one_failing_prompt_fails_its_line_once_and_frees_the_others(bench: Bench) -> None:
    bench.write(
        {"id": 1, "prompt": ["LONG one", "BREAK", "LONG two"], "n": 2},
        {"id": 2, "prompt": ["LONG", "x" * 500]},
        {"id": 3, "prompt": "fine"},
    )
    assert bench.run() == 1
    assert sorted(bench.ids()) == [1, 2, 3]
    bench.engines[0].poll()  # the cancelled requests' last words
    assert not bench.engines[0].has_unfinished


def test_errors_can_have_a_file_of_their_own(bench: Bench, tmp_path: Path) -> None:
    errors = tmp_path / "errors.jsonl"
    bench.write({"id": 1, "prompt": "BREAK"}, {"id": 2, "prompt": "x"})
    assert bench.run(errors=errors) == 1
    assert bench.ids() == [2]
    assert [record["custom_id"] for record in bench.records(errors)] == [1]
    assert bench.run(errors=errors, resume=True) == 1
    assert len(bench.records(errors)) == 1
    with pytest.raises(UsageError, match="errors was"):
        bench.run(resume=True)


def test_a_verbose_run_tells_of_every_error(bench: Bench) -> None:
    bench.write(*({"id": n, "prompt": "BREAK"} for n in range(20)))
    assert bench.run() == 1
    assert "scripted failure" not in bench.notes.getvalue()
    assert bench.run(overwrite=True, verbose=True) == 1
    assert bench.notes.getvalue().count("scripted failure") == 20
    assert "line 7: scripted failure" in bench.notes.getvalue()


def test_a_wholly_bad_file_loads_no_model(bench: Bench) -> None:
    bench.write({"id": 1, "prompt": 3}, {"id": 2, "prompt": "x", "foo": 1})
    assert bench.run() == 1
    assert len(bench.records()) == 2
    assert not bench.engines


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_input_is_a_usage_error(bench: Bench, text: str) -> None:
    bench.input = bench.folder / "in.txt"
    bench.input.write_text(text)
    with pytest.raises(UsageError, match="no requests"):
        bench.run()


def test_a_system_prompt_for_completions_is_refused(bench: Bench) -> None:
    bench.write(*prompts(2))
    with pytest.raises(UsageError, match="--system is for chats"):
        bench.run(defaults=RequestDefaults(system="x"))


def test_completion_order_and_input_order(bench: Bench) -> None:
    bench.write({"id": 0, "prompt": "LONG"}, *({"id": n, "prompt": str(n), "max_tokens": 1} for n in range(1, 9)))
    bench.run()
    assert bench.ids()[-1] == 0
    bench.run(order="input", overwrite=True)
    assert bench.ids() == list(range(9))


def test_input_order_holds_a_bounded_number_of_records(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "LEAST_AHEAD", 4)
    monkeypatch.setattr(runner_module, "MOST_HELD_PER_AHEAD", 2)
    bench.write({"id": 0, "prompt": "LONG"}, *({"id": n, "prompt": str(n), "max_tokens": 1} for n in range(1, 40)))
    submitted_before_the_first_record = 0

    def watch(engine: FakeEngine) -> None:
        nonlocal submitted_before_the_first_record
        if not bench.out.stat().st_size:
            submitted_before_the_first_record = len(engine.submitted)

    bench.before_step = watch
    bench.run(order="input")
    assert bench.ids() == list(range(40))
    assert submitted_before_the_first_record == 8


def test_the_engine_is_given_a_bounded_number_of_requests(bench: Bench) -> None:
    bench.write(*prompts(1000))
    assert bench.run() == 0
    assert bench.engines[0].most_held == runner_module.LEAST_AHEAD
    assert bench.submitted == 1000
    bench.config = EngineConfig(max_num_seqs=100)
    bench.run(overwrite=True)
    assert bench.engines[1].most_held == 200


def test_few_long_prompts_are_held_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "MOST_TOKENS_AHEAD", 500)
    bench.write(*prompts(30, "word " * 40))
    assert bench.run() == 0
    assert bench.engines[0].most_held == 3
    assert len(bench.ids()) == 30


def test_limit_takes_the_first_requests_and_a_resume_goes_further(bench: Bench) -> None:
    bench.write(*prompts(10))
    assert bench.run(limit=4) == 0
    assert sorted(bench.ids()) == [0, 1, 2, 3]
    assert bench.run(limit=6, resume=True) == 0
    assert sorted(bench.ids()) == list(range(6))
    assert bench.run(resume=True) == 0
    assert sorted(bench.ids()) == list(range(10))
    assert bench.submitted == 10


def test_a_resume_runs_only_what_is_missing(bench: Bench) -> None:
    bench.write(*prompts(20))
    bench.run()
    whole = bench.out.read_bytes().splitlines(keepends=True)
    bench.out.write_bytes(b"".join(whole[:12]) + whole[12][:9])
    assert bench.run(resume=True) == 0
    assert sorted(bench.ids()) == list(range(20))
    assert len(bench.engines[1].submitted) == 8
    assert bench.run(resume=True) == 0
    assert len(bench.engines) == 2  # nothing left: no model is loaded
    assert "nothing left to do" in bench.notes.getvalue()


def test_a_resume_of_another_run_is_refused(bench: Bench) -> None:
    bench.write(*prompts(3))
    bench.run()
    with pytest.raises(UsageError, match=r"temperature was 0\.0 and is now 0\.5"):
        bench.run(resume=True, defaults=RequestDefaults(temperature=0.5))
    bench.write(*prompts(4))
    with pytest.raises(UsageError, match="content of the input"):
        bench.run(resume=True)
    with pytest.raises(UsageError, match="already holds records"):
        bench.run()
    assert bench.run(overwrite=True) == 0
    assert sorted(bench.ids()) == [0, 1, 2, 3]


def test_failed_requests_are_retried_when_asked(bench: Bench) -> None:
    bench.write({"id": 1, "prompt": "BREAK"}, {"id": 2, "prompt": "x"})
    assert bench.run() == 1
    assert bench.run(resume=True) == 1
    assert bench.run(retry_errors=True) == 1
    assert sorted(bench.ids()) == [1, 2]
    assert bench.submitted == 3


def test_an_engine_that_fails_leaves_a_run_to_be_resumed(bench: Bench) -> None:
    bench.write(*prompts(90))

    def fail(engine: FakeEngine) -> None:
        if len(engine.submitted) > 70:
            raise EngineError("the GPU fell over")

    bench.before_step = fail
    with pytest.raises(EngineError, match=r"the GPU fell over\n\d+ of 90 requests were done; go on with --resume"):
        bench.run()
    assert bench.engines[0].closed
    assert 0 < len(bench.records()) < 90
    bench.before_step = lambda engine: None
    assert bench.run(resume=True) == 0
    assert sorted(bench.ids()) == list(range(90))


def test_an_engine_that_loses_a_request_is_noticed(bench: Bench) -> None:
    bench.write(*prompts(2))
    bench.before_step = lambda engine: engine._running.clear() or engine._waiting.clear()
    with pytest.raises(EngineError, match="lost 2 requests"):
        bench.run()


def interrupt_at(bench: Bench, *steps: int, number: int = signal.SIGINT) -> None:
    seen = [0]

    def before_step(engine: FakeEngine) -> None:
        seen[0] += 1
        if seen[0] in steps:
            os.kill(os.getpid(), number)

    bench.before_step = before_step


def test_the_first_interrupt_finishes_what_runs(bench: Bench) -> None:
    bench.write(*prompts(100, "LONG"))
    interrupt_at(bench, 20)
    assert bench.run() == 130
    assert len(bench.ids()) == 4  # the rows that ran; what waited was taken back
    assert "finishing 4 running requests" in bench.notes.getvalue()
    assert "4 of 100 requests done; go on with --resume" in bench.notes.getvalue()
    bench.before_step = lambda engine: None
    assert bench.run(resume=True) == 0
    assert sorted(bench.ids()) == list(range(100))


@pytest.mark.parametrize(("steps", "number"), [((20, 25), signal.SIGINT), ((20,), signal.SIGTERM)])
def test_the_second_interrupt_and_sigterm_stop_at_once(bench: Bench, steps: Iterable[int], number: int) -> None:
    bench.write({"id": "short", "prompt": "x", "max_tokens": 3}, *prompts(40, "LONG"))
    interrupt_at(bench, *steps, number=number)
    assert bench.run() == 130
    assert bench.ids() == ["short"]
    bench.before_step = lambda engine: None
    assert bench.run(resume=True) == 0
    assert sorted(bench.ids(), key=str) == sorted([*range(40), "short"], key=str)


def test_an_interrupt_in_the_last_requests_is_no_failure(bench: Bench) -> None:
    bench.write(*prompts(4, "LONG"))
    interrupt_at(bench, 20)
    assert bench.run() == 0


def test_handlers_are_restored(bench: Bench) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    bench.write(*prompts(1))
    bench.run()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_statistics_add_up(bench: Bench, tmp_path: Path) -> None:
    bench.write(*prompts(20), {"id": "bad", "prompt": 3})
    assert bench.run(stats=tmp_path / "stats.json") == 1
    stats = json.loads((tmp_path / "stats.json").read_text())
    answers = [record for record in bench.records() if "error" not in record]
    assert stats["requests"]["answered"] == 20
    assert stats["requests"]["failed"] == 1
    assert stats["tokens"]["output"] == sum(record["usage"]["completion_tokens"] for record in answers)
    assert stats["tokens"]["prompt"] == sum(record["usage"]["prompt_tokens"] for record in answers)
    assert stats["load_seconds"] <= stats["first_token_seconds"] <= stats["load_seconds"] + stats["seconds"] + 5
    latency: Mapping[str, Any] = stats["latency_seconds"]
    assert latency["ttft"]["count"] == latency["queue"]["count"] == 20
    assert latency["ttft"]["p50"] <= latency["ttft"]["p95"] <= latency["ttft"]["p99"] <= latency["ttft"]["max"]
    assert latency["tpot"]["p50"] == 1.0  # the fake engine's clock: one second a step
    assert "20 answered, 1 failed" in bench.tables.getvalue()


def test_an_unwritable_stats_file_is_refused_before_the_work(bench: Bench, tmp_path: Path) -> None:
    bench.write(*prompts(1))
    for path in (tmp_path / "no" / "stats.json", tmp_path):
        with pytest.raises(UsageError, match="cannot write"):
            bench.run(stats=path)
    assert not bench.engines


def test_a_dry_run_reads_everything_and_touches_nothing(bench: Bench) -> None:
    bench.write(*prompts(5), {"id": 9, "prompt": 3})
    reporter = SilentReporter(Console(file=bench.notes, width=200))
    tables = Console(file=bench.tables, width=120)
    assert dry_run(bench.options(), reporter, tables) == 1
    assert not bench.out.exists()
    assert "line 6: a prompt is a text" in bench.notes.getvalue()
    assert "6, of which 5 need the model" in bench.tables.getvalue()
    bench.run(limit=2)
    before = bench.out.read_bytes() + b"torn"
    bench.out.write_bytes(before)
    assert dry_run(bench.options(resume=True), reporter, tables) == 1
    assert bench.out.read_bytes() == before
    assert "4, of which 3 need the model" in bench.tables.getvalue()
    with pytest.raises(UsageError, match="temperature"):
        dry_run(bench.options(resume=True, defaults=RequestDefaults()), reporter, None)


def test_a_line_that_changes_under_the_run_is_an_error_record(bench: Bench) -> None:
    bench.write(*prompts(200))
    text = bench.input.read_text()

    def change(engine: FakeEngine) -> None:
        with bench.input.open("r+") as file:
            file.write(text.replace('"id": 199', '"id": 666'))

    bench.before_step = change
    assert bench.run() == 1
    (error,) = [record["error"] for record in bench.records() if "error" in record]
    assert (error["code"], error["line"]) == ("input_changed", 200)


def test_an_input_that_is_cut_under_the_run_is_noticed(bench: Bench) -> None:
    bench.write(*prompts(2000))
    bench.before_step = lambda engine: os.truncate(bench.input, 10_000)
    with pytest.raises(EngineError, match=r"ended \d+ requests early"):
        bench.run()


def test_standard_input_can_be_resumed_from_its_content(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = BytesIO()

    monkeypatch.setattr("sys.stdin", Stdin)
    for limit, resume in ((1, False), (None, True)):
        Stdin.buffer = BytesIO(b"one\ntwo\nthree\n")
        assert bench.run(input="-", limit=limit, resume=resume) == 0
    assert sorted(bench.ids()) == ["line-1", "line-2", "line-3"]
