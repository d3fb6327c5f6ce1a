"""The engine process with a real model in it: killed, fuzzed, shared."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from e2e.fuzz_engine import fuzz
from e2e.kill_engine import kill_rounds, tiny_model
from e2e.shared_engine import Setup, finish, records_of, shared, stop_all, watching
from process_harness import runtime_in, scripted_launcher

from mlxbatch import LLM, SamplingParams
from mlxbatch.config import EngineConfig
from mlxbatch.engine.local import LocalEngine
from mlxbatch.errors import EngineError
from mlxbatch.process.client import ProcessEngine
from mlxbatch.process.control import stop_engine
from mlxbatch.process.launcher import Launcher
from mlxbatch.process.paths import RuntimeDir
from mlxbatch.process.registry import Registry


@pytest.fixture(autouse=True)
def one_thread_per_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model gains nothing from more, and idle BLAS threads spin."""
    monkeypatch.setenv("MKL_NUM_THREADS", "1")


@pytest.mark.parametrize("client", ["sync", "async"])
def test_greedy_text_is_the_undisturbed_one_after_kill_9(tmp_path: Path, client: str) -> None:
    kill_rounds(tiny_model(tmp_path), tmp_path, kills=1, kind=client, seed=5)


@pytest.mark.slow
def test_kill_9_twenty_times(tmp_path: Path) -> None:
    kill_rounds("smollm2-135m", tmp_path, kills=20)


def test_bytes_on_the_socket_never_harm_the_engine(tmp_path: Path) -> None:
    runtime = runtime_in(tmp_path)
    try:
        fuzz(scripted_launcher(runtime), attacks=300, seed=3)
    finally:
        for record in Registry(runtime).live():
            stop_engine(record, runtime, force=True)


@pytest.mark.slow
def test_bytes_on_the_socket_never_harm_the_real_engine(tmp_path: Path) -> None:
    runtime = runtime_in(tmp_path)
    try:
        fuzz(Launcher(EngineConfig(model=tiny_model(tmp_path)), runtime=runtime), attacks=2000, seed=4)
    finally:
        for record in Registry(runtime).live():
            stop_engine(record, runtime, force=True)


def test_two_chats_and_a_run_share_one_engine(tmp_path: Path) -> None:
    shared(Setup(tmp_path, tiny_model(tmp_path), run_requests=400, run_tokens=64, chat_tokens=96))


def test_llm_gives_the_same_tokens_in_this_process_and_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "r"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    runtime = RuntimeDir.of_user()
    assert runtime.path.is_relative_to(tmp_path) or sys.platform == "darwin"
    model = tiny_model(tmp_path)
    prompts = ["The capital of France", "def add(first, second):"]
    params = [SamplingParams(temperature=0, max_tokens=20), SamplingParams(seed=3, n=2, max_tokens=20, logprobs=2)]
    results = []
    try:
        for in_process in (True, False):
            with LLM(model, in_process=in_process, max_num_seqs=4) as llm:
                results.append(llm.generate(prompts, params))
                assert not llm.engine.has_unfinished
    finally:
        for record in Registry(runtime).live():
            stop_engine(record, runtime, force=True)
    for here, there in zip(*results, strict=True):
        assert (here.prompt, here.prompt_token_ids) == (there.prompt, there.prompt_token_ids)
        for mine, other in zip(here.outputs, there.outputs, strict=True):
            assert (mine.text, mine.token_ids) == (other.text, other.token_ids)
            assert mine.finish_reason == other.finish_reason
            ours, theirs = ([entry.logprob for entry in output.logprobs or ()] for output in (mine, other))
            assert ours == pytest.approx(theirs, abs=1e-4)  # rounding depends on who shares a step
            assert len(ours) == (20 if len(here.outputs) == 2 else 0)


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    source = tiny_model(tmp_path)
    names = [str(tmp_path / name) for name in ("first", "second", "third")]
    for name in names:
        shutil.copytree(source, name)
    return names


def test_small_models_stand_side_by_side_without_a_flag(tmp_path: Path, models: list[str]) -> None:
    runtime = runtime_in(tmp_path)
    alone = LocalEngine(EngineConfig(model=models[0]))
    claim = alone.claim
    alone.close()
    try:
        engines = [ProcessEngine(Launcher(EngineConfig(model=model), runtime=runtime)) for model in models[:2]]
        held = [record.reserved_bytes for record in Registry(runtime).live()]
        assert held == [claim.full, claim.full]
        assert sum(held) <= claim.machine
        for engine in engines:
            engine.close()
    finally:
        for record in Registry(runtime).live():
            stop_engine(record, runtime, force=True)


def test_a_second_model_gets_what_the_first_leaves_and_a_third_hears_who_holds_it(
    tmp_path: Path, models: list[str]
) -> None:
    runtime = runtime_in(tmp_path)
    alone = LocalEngine(EngineConfig(model=models[0]))
    claim, layers, limit = alone.claim, alone.snapshot().model.layers, alone.core.scheduler.kv.limit
    fixed = claim.reserved - limit - -(-limit // layers)
    alone.close()
    left = (claim.least + claim.full) // 2
    pool = (claim.machine - left - fixed) * layers // (layers + 1)  # as large as --kv-memory says, and never smaller
    try:
        first = ProcessEngine(Launcher(EngineConfig(model=models[0], kv_memory=pool), runtime=runtime))
        second = ProcessEngine(Launcher(EngineConfig(model=models[1]), runtime=runtime))
        held = {Path(record.model).name: record.reserved_bytes for record in Registry(runtime).live()}
        assert claim.least <= held["second"] < claim.full
        assert held["first"] + held["second"] <= claim.machine
        second.close()
        for config in (EngineConfig(model=models[2]), EngineConfig(model=models[2], kv_memory=pool)):
            with pytest.raises(EngineError) as refused:
                ProcessEngine(Launcher(config, runtime=runtime))
            message = str(refused.value)
            assert ("does not fit beside other engines" if config.kv_memory else "no room for KV blocks") in message
            assert f"{models[0]} holds" in message and f"{models[1]} holds" in message
            assert f"mlxbatch engine stop {models[1]}" in message  # idle, unlike the first
        held = {Path(record.model).name: record.reserved_bytes for record in Registry(runtime).live()}
        assert held["second"] == claim.least  # it gave way, in vain
        first.close()
    finally:
        for record in Registry(runtime).live():
            stop_engine(record, runtime, force=True)


def test_a_killed_run_that_asked_to_keep_going_loses_no_token(tmp_path: Path) -> None:
    """kill -9 the command in the middle of its answers: the resumed run takes them up from the engine."""
    setup = Setup(tmp_path, tiny_model(tmp_path), run_requests=8, run_tokens=120, chat_tokens=1)
    flags = ["-i", "in.jsonl", "-o", "out.jsonl", "--max-tokens", "120", "-q", "--keep-going"]
    try:
        run = setup.start("run", *flags)
        with watching(setup) as watcher:
            assert watcher.batch_started.wait(120)
            run.kill()
            run.communicate()
        finish(setup.start("run", *flags, "--resume", "--stats", "stats.json"))
        finish(setup.start("run", "-i", "in.jsonl", "-o", "alone.jsonl", "--max-tokens", "120", "-q"))
        engine = ProcessEngine(Launcher(EngineConfig(model=setup.model), runtime=setup.runtime), kind="top")
        counters = engine.snapshot().counters
        engine.close()
    finally:
        stop_all(setup)
    answers = [records_of((tmp_path / name).read_text()) for name in ("out.jsonl", "alone.jsonl")]
    assert answers[0] == answers[1] and len(answers[0]) == 8
    assert counters.requests_submitted == 16 and counters.requests_aborted == 0  # none of the 8 was begun twice
