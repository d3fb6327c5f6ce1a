"""A drill: memory pressure cuts the KV budget to a tenth in the middle of a run."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiny_models
from greedy_oracle import Comparison, greedy

from mlxbatch.capacity.pressure import Pressure
from mlxbatch.config import EngineConfig
from mlxbatch.engine.local import LocalEngine
from mlxbatch.models import load
from mlxbatch.request import Request, SamplingParams

NEW_TOKENS = 40
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
CALM, PRESSED = Pressure(0.9), Pressure(0.02)


@pytest.fixture(scope="module")
def drill(tmp_path_factory: Any) -> Any:
    path = tmp_path_factory.mktemp("llama")
    tiny_models.write_dir("llama", path)
    loaded = load(str(path))
    numbers = random.Random(5)
    prompts = [[numbers.randrange(3, 400) for _ in range(n)] for n in (5, 90, 33, 16, 47, 64, 8, 71, 29, 55, 12, 80)]
    return loaded, prompts, [greedy(loaded.model, prompt, NEW_TOKENS) for prompt in prompts]


def engine_for(loaded: Any, pressure: Any = lambda: CALM, **settings: Any) -> LocalEngine:
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 8, **settings}
    probe = LocalEngine(EngineConfig(model=loaded.name, **values), loaded=loaded)
    block = sum(group.bytes_per_block for group in probe.core.scheduler.kv.specs)
    probe.close()
    return LocalEngine(
        EngineConfig(model=loaded.name, kv_memory=200 * block, **values), loaded=loaded, pressure=pressure
    )


@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "no-prefix"])
def test_a_tenth_of_the_budget_loses_no_request_and_changes_no_token(drill: Any, prefix: bool) -> None:
    loaded, prompts, oracle = drill
    engine = engine_for(loaded, prefix_caching=prefix)
    scheduler = engine.core.scheduler
    full = scheduler.kv.budget
    for number, prompt in enumerate(prompts):
        engine.submit(Request(str(number), tuple(prompt), PARAMS))
    outputs: list[list[int]] = [[] for _ in prompts]
    reasons: dict[str, str] = {}
    cut, held = 0, []
    while engine.has_unfinished:
        for delta in engine.poll():
            outputs[int(delta.request_id)] += delta.token_ids
            if delta.finish_reason:
                reasons[delta.request_id] = delta.finish_reason
        scheduler.check()
        if not cut and sum(map(len, outputs)) > 100:
            cut = scheduler.set_kv_budget(full // 10)
        elif cut:
            held.append(scheduler.kv.bytes_held)
    assert full // 10 <= cut < full // 4
    assert scheduler.num_preemptions > 0, "the cut must hurt for this to mean something"
    assert max(held[1:]) <= full // 4
    assert engine.stats()["kv_pool_allocated_bytes"] <= full // 4  # the arrays themselves are as small
    assert reasons == {str(n): "length" for n in range(len(prompts))}
    comparison = Comparison()
    for number, (got, want) in enumerate(zip(outputs, oracle, strict=True)):
        comparison.add(f"prompt {number}", got, want)
    assert comparison.ok, comparison
    engine.close()


def test_pressure_of_the_machine_reaches_the_pool_and_calm_gives_it_back(drill: Any, monkeypatch: Any) -> None:
    loaded, prompts, _ = drill
    readings = [CALM]
    engine = engine_for(loaded, pressure=lambda: readings[0])
    scheduler, clock = engine.core.scheduler, [1000.0]
    monkeypatch.setattr(engine.core, "clock", lambda: clock[0])
    full = scheduler.kv.budget

    def go(seconds: float, **state: Any) -> None:
        for _ in range(int(seconds)):
            clock[0] += 1.0
            engine.poll()

    for number, prompt in enumerate(prompts):
        engine.submit(Request(str(number), tuple(prompt), PARAMS))
    go(3)
    assert scheduler.kv.budget == full
    readings[0] = PRESSED
    go(30)
    assert scheduler.kv.budget < full // 4
    assert scheduler.kv.bytes_held <= scheduler.kv.budget
    readings[0] = CALM
    go(400)
    assert not engine.has_unfinished
    assert scheduler.kv.budget == full
    kinds = [event.kind for event in engine.core.events]
    assert "shrink" in kinds
    assert "grow" in kinds
    engine.close()


def test_an_idle_engine_gives_its_pool_back(drill: Any, monkeypatch: Any) -> None:
    loaded, prompts, _ = drill
    engine = engine_for(loaded)
    clock = [0.0]
    monkeypatch.setattr(engine.core, "clock", lambda: clock[0])
    engine.submit(Request("a", tuple(prompts[1]), PARAMS))
    tokens: list[int] = []
    while engine.has_unfinished:
        tokens += [t for delta in engine.poll() for t in delta.token_ids]
    before = engine.stats()["kv_pool_allocated_bytes"]
    for _ in range(90):
        clock[0] += 1.0
        engine.poll()
    after = engine.stats()["kv_pool_allocated_bytes"]
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after < before / 4
    engine.submit(Request("b", tuple(prompts[1]), PARAMS))  # and works on
    again: list[int] = []
    while engine.has_unfinished:
        again += [t for delta in engine.poll() for t in delta.token_ids]
    assert again == tokens
    engine.close()


def test_a_request_that_only_fits_without_pressure_takes_memory_back(drill: Any) -> None:
    loaded, _, _ = drill
    engine = engine_for(loaded)
    scheduler = engine.core.scheduler
    full = scheduler.kv.budget
    scheduler.set_kv_budget(full // 20)
    long = [7, 9, 11] * 200
    engine.submit(Request("long", tuple(long), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)))
    tokens: list[int] = []
    while engine.has_unfinished:
        tokens += [t for delta in engine.poll() for t in delta.token_ids]
    comparison = Comparison()
    comparison.add("long", tokens, greedy(loaded.model, long, 8))
    assert comparison.ok, comparison
    assert full // 20 < scheduler.kv.budget <= full
    engine.close()


def test_a_request_that_outgrows_a_cut_budget_takes_memory_back(drill: Any) -> None:
    loaded, prompts, _ = drill
    engine = engine_for(loaded)
    scheduler = engine.core.scheduler
    full = scheduler.kv.budget
    prompt = prompts[2]
    engine.submit(Request("grows", tuple(prompt), SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)))
    tokens: list[int] = []
    cut = 0
    while engine.has_unfinished:
        tokens += [t for delta in engine.poll() for t in delta.token_ids]
        scheduler.check()
        if not cut and len(tokens) >= 5:
            cut = scheduler.set_kv_budget(1)
    assert 1 < cut < scheduler.kv.budget < full
    assert scheduler.num_preemptions == 0, "nothing is gained by preempting a request that runs alone"
    comparison = Comparison()
    comparison.add("grows", tokens, greedy(loaded.model, prompt, 150))
    assert comparison.ok, comparison
    engine.close()


@pytest.mark.parametrize("evict", [False, True])
def test_an_idle_engine_gives_way_to_another_and_takes_it_back(drill: Any, evict: bool) -> None:
    loaded, prompts, oracle = drill
    engine = LocalEngine(EngineConfig(model=loaded.name, max_num_seqs=8, block_size=8), loaded=loaded)
    kv = engine.core.scheduler.kv

    def answer(number: int) -> list[int]:
        engine.submit(Request(str(number), tuple(prompts[number]), PARAMS))
        tokens: list[int] = []
        while engine.has_unfinished:
            tokens += [t for delta in engine.poll() for t in delta.token_ids]
        return tokens

    whole = engine.claim
    assert whole.least < whole.reserved == whole.full <= whole.machine
    for number in range(len(prompts)):
        assert answer(number) == oracle[number].token_ids
    held = kv.bytes_held
    engine.resize(0, evict=evict)
    engine.core.scheduler.check()
    if evict:
        assert engine.claim.reserved == whole.least and kv.bytes_held <= kv.limit
        assert engine.stats()["kv_pool_allocated_bytes"] == kv.bytes_held
    else:
        assert whole.least <= engine.claim.reserved < whole.full and kv.bytes_held == held
    assert answer(1) == oracle[1].token_ids
    engine.resize(whole.full)
    assert engine.claim == whole and kv.budget == kv.limit
    assert [event.kind for event in engine.core.events if event.text.startswith("beside")] == ["shrink", "grow"]
    engine.close()


def test_a_pool_that_the_user_named_does_not_give_way(drill: Any) -> None:
    engine = engine_for(drill[0])
    claim, limit = engine.claim, engine.core.scheduler.kv.limit
    assert claim.least == claim.reserved == claim.full
    engine.resize(0, evict=True)
    assert (engine.claim, engine.core.scheduler.kv.limit) == (claim, limit)
    engine.close()
