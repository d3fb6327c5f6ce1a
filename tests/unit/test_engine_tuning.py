"""What an engine decides from its settings, the chip table and a measured curve."""

from __future__ import annotations

import pytest

from mlxbatch.capacity.chips import find_chip
from mlxbatch.capacity.known_models import find_shape
from mlxbatch.capacity.measured_curve import DecodePoint, MeasuredCurve
from mlxbatch.config import EngineConfig
from mlxbatch.engine.metrics import EngineMetrics, Targets
from mlxbatch.engine.tuning import Tuning, machine_key, model_key, tune_for, with_mode
from mlxbatch.request import RequestTiming
from mlxbatch.scheduling.budget import StepLoad
from mlxbatch.scheduling.plan import ChunkRow, DecodeRow, KVView, StepPlan

ULTRA = find_chip("m2-ultra")


def decide(config: EngineConfig, *, chip=ULTRA, model="llama-3.1-8b", curve=None) -> Tuning:
    shape = find_shape(model) if model else None
    return tune_for(config, shape=shape, chip=chip, dtype_bytes=2, curve=curve)


def stairs() -> MeasuredCurve:
    seconds = {r: 0.01 * r if r < 12 else 0.06 for r in range(1, 33)}
    return MeasuredCurve("m", "c", tuple(DecodePoint(r, 32, t) for r, t in seconds.items()), measured_at="today")


def test_rows_from_the_table_the_user_and_the_curve() -> None:
    assert decide(EngineConfig()).rows == 32
    assert decide(EngineConfig(), model="mixtral-8x7b").rows == 16
    assert decide(EngineConfig(max_num_seqs=5)).rows == 5
    tuned = decide(EngineConfig(), curve=stairs())
    assert tuned.rows == 32
    assert "today" in tuned.reason
    assert decide(EngineConfig(max_num_batched_tokens=24)).rows == 8  # the budget must hold rows and a block
    assert decide(EngineConfig(), chip=None, model=None).rows == 16


def test_padding_comes_from_a_measured_curve_only() -> None:
    assert decide(EngineConfig()).row_sizes == ()
    sizes = decide(EngineConfig(), curve=stairs()).row_sizes
    assert sizes == (1, 2, 3, 4, 5, 6, 12, *range(13, 33))  # 7 to 11 rows run as 12
    assert decide(EngineConfig(max_num_seqs=4, deterministic=True), curve=stairs()).row_sizes == (4,)


def test_modes_set_what_the_user_left_open() -> None:
    interactive = with_mode(EngineConfig(mode="interactive"))
    assert (interactive.tpot_target, interactive.ttft_target, interactive.max_num_batched_tokens) == (0.05, 1.0, 256)
    own = with_mode(EngineConfig(mode="interactive", tpot_target=0.2, max_num_batched_tokens=100))
    assert (own.tpot_target, own.max_num_batched_tokens) == (0.2, 100)
    assert with_mode(EngineConfig(mode="throughput")).max_num_batched_tokens == 2048
    assert with_mode(EngineConfig()) == EngineConfig()
    many = with_mode(EngineConfig(mode="interactive", max_num_seqs=250))
    assert many.max_num_batched_tokens == 266
    assert decide(EngineConfig(mode="interactive")).rows < decide(EngineConfig(mode="throughput")).rows


def test_a_target_gives_a_latency_budget_and_none_protects_chats_but_for_throughput() -> None:
    budgets = [
        decide(config).prefill_budget
        for config in (EngineConfig(tpot_target=0.05), EngineConfig(), EngineConfig(mode="throughput"))
    ]
    assert [type(budget).__name__ for budget in budgets] == ["LatencyBudget", "ChatBudget", "WholeStep"]
    assert {budget.grant(StepLoad((), (), 100, 0.0)).num_tokens for budget in budgets} == {100}


def test_steps_that_were_run_correct_the_model() -> None:
    tuning = decide(EngineConfig(), chip=None, model=None)
    view = KVView(0, ())
    decode = StepPlan(0, 4, decode=tuple(DecodeRow(i, i, 500, 1, -1, view) for i in range(4)))
    mixed = StepPlan(0, 4, decode=decode.decode, chunks=(ChunkRow(9, 9, 32, (1,) * 64, view, ()),))
    for _ in range(10):
        tuning.observe(decode, 1.5)
        tuning.observe(mixed, 4.0)
    assert tuning.cost.predict(4, 0, 500) == pytest.approx(1.5, rel=0.01)
    assert tuning.cost.predict(4, 64, 500, prefill_context=64) == pytest.approx(4.0, rel=0.01)


def test_the_curve_that_is_shown_names_its_source() -> None:
    table, tuned, guess = (
        decide(EngineConfig()),
        decide(EngineConfig(), curve=stairs()),
        decide(EngineConfig(), chip=None, model=None),
    )
    assert (table.curve().source, tuned.curve().source, guess.curve().source) == ("chip table", "tuned", "")
    assert tuned.curve().points[0].efficiency == 1.0
    assert tuned.curve().cap == 32
    assert tuned.curve().saturation is not None
    assert guess.curve().cap == 16


def test_names_under_which_curves_are_kept() -> None:
    assert machine_key(ULTRA) == "m2-ultra"
    assert "cpu" in machine_key(None)
    one, other = (model_key("org/Model-4bit", print_, "bfloat16") for print_ in ("a" * 64, "b" * 64))
    assert one != other
    assert "/" not in one


def test_goodput_counts_requests_inside_both_targets() -> None:
    metrics = EngineMetrics(started=0.0)
    metrics.targets = Targets(ttft=1.0, tpot=0.1)

    def finished(ttft: float, tpot: float) -> RequestTiming:
        return RequestTiming("r", 0.0, 0.0, ttft, ttft + 9 * tpot, 5, 10, 0, 0)

    for timing in (finished(0.5, 0.05), finished(1.5, 0.05), finished(0.5, 0.2), finished(0.9, 0.09)):
        metrics.on_timing(timing)
    assert metrics.stats(preemptions=0, evictions=0)["goodput"] == 0.5
    assert "goodput" not in EngineMetrics(started=0.0).stats(preemptions=0, evictions=0)
