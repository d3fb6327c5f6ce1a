"""The simulated machine, its loads, and the baselines on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxbatch.capacity.calibration import FITTED
from mlxbatch.capacity.chips import find_chip
from mlxbatch.capacity.known_models import find_shape
from mlxbatch.capacity.kv_bytes import KVFormat
from mlxbatch.capacity.model_shape import Quantization
from mlxbatch.capacity.roofline import Roofline
from mlxbatch.engine.metrics import Targets
from mlxbatch.errors import UsageError
from mlxbatch.scheduling.plan import DecodeRow, KVView, StepPlan
from mlxbatch.simulate.arrivals import (
    CHAT_OUTPUTS,
    CHAT_PROMPTS,
    SimRequest,
    parse_lengths,
    parse_rate,
    poisson,
    read_trace,
)
from mlxbatch.simulate.baselines import dynamic_batching, static_batching, whole_prompts
from mlxbatch.simulate.device import SimulatedDevice, VirtualClock
from mlxbatch.simulate.machine import Machine, Setup, Simulation, group_specs, simulate

TARGETS = Targets(ttft=2.0, tpot=0.1)


def machine(kv_budget: int = 10_000_000_000, model: str = "llama-3.1-8b") -> Machine:
    shape = find_shape(model)
    return Machine(
        shape, Roofline(shape, find_chip("m2-ultra"), FITTED, quantization=Quantization(4)), kv_budget, 8192
    )


def chat(count: int = 60, rate: float = 1.0, seed: int = 0) -> list[SimRequest]:
    return poisson(rate, count, parse_lengths(CHAT_PROMPTS), parse_lengths("lognormal:60,0.8"), seed=seed, most=4096)


# -- loads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "rate"), [("2/s", 2.0), ("90/m", 1.5), ("3", 3.0), ("7200/h", 2.0)])
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["fast", "2/day", "-1/s", "0", "2/s/s"])
def test_bad_rates(text: str) -> None:
    with pytest.raises(UsageError, match="not a rate"):
        parse_rate(text)


def test_poisson_arrivals_have_the_rate_and_the_lengths() -> None:
    requests = poisson(5.0, 4000, parse_lengths(CHAT_PROMPTS), parse_lengths(CHAT_OUTPUTS), seed=3)
    assert requests[-1].arrival == pytest.approx(800, rel=0.05)
    mean_prompt = sum(r.prompt_tokens for r in requests) / len(requests)
    mean_output = sum(r.output_tokens for r in requests) / len(requests)
    assert mean_prompt == pytest.approx(161, rel=0.08)  # ShareGPT, as the vLLM paper gives it
    assert mean_output == pytest.approx(338, rel=0.08)
    assert requests == poisson(5.0, 4000, parse_lengths(CHAT_PROMPTS), parse_lengths(CHAT_OUTPUTS), seed=3)


def test_lengths_keep_within_the_context() -> None:
    requests = poisson(1.0, 500, parse_lengths("lognormal:500,2"), parse_lengths("uniform:1-5000"), most=1000)
    assert all(r.output_tokens >= 1 and r.prompt_tokens + r.output_tokens <= 1000 for r in requests)


def test_lengths_from_a_file_and_nonsense(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("5\n7\n")
    drawn = {r.prompt_tokens for r in poisson(1.0, 50, parse_lengths(str(path)), parse_lengths("3"))}
    assert drawn == {5, 7}
    for text in ("many", "uniform:9-2", "lognormal:0,1", "0", "uniform:a-b"):
        with pytest.raises(UsageError, match="as lengths"):
            parse_lengths(text)


def test_traces_as_jsonl_and_as_public_csv(tmp_path: Path) -> None:
    lines = [{"arrival": 10.0 + i, "prompt_tokens": 100 + i, "output_tokens": 5} for i in range(3)]
    jsonl = tmp_path / "trace.jsonl"
    jsonl.write_text("\n".join(json.dumps(line) for line in lines))
    assert read_trace(jsonl) == [SimRequest(float(i), 100 + i, 5) for i in range(3)]
    table = tmp_path / "azure.csv"
    table.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.680590,374,44\n2023-11-16 18:15:50.680590,396,109\n"
    )
    assert read_trace(table) == [SimRequest(0.0, 374, 44), SimRequest(4.0, 396, 109)]
    jsonl.write_text('{"arrival": 1, "prompt_tokens": 5}\n')
    with pytest.raises(UsageError, match="line 1"):
        read_trace(jsonl)
    with pytest.raises(UsageError, match="no request"):
        (tmp_path / "empty.jsonl").write_text("")
        read_trace(tmp_path / "empty.jsonl")


# -- the device --------------------------------------------------------------------------------------------


def test_groups_are_those_of_the_model() -> None:
    (full,) = group_specs(find_shape("llama-3.1-8b"), KVFormat())
    assert (full.name, full.window, full.bytes_per_block) == ("full", None, 16 * 131_072)
    names = {g.name: len(g.layers) for g in group_specs(find_shape("gpt-oss-20b"), KVFormat())}
    assert names == {"window 128": 12, "full": 12}
    (latent,) = group_specs(find_shape("deepseek-v3"), KVFormat())
    assert latent.bytes_per_block == 16 * 61 * 576 * 2


def test_a_lone_request_takes_the_time_that_the_model_says() -> None:
    m = machine()
    request = SimRequest(3.0, 100, 11)
    (timing,) = Simulation(m, Setup(8, run_ahead=False)).run([request])
    expected = m.times.seconds(0, 100, prefill_context=50)
    assert timing.first_token == pytest.approx(3.0 + expected)
    expected += sum(m.times.seconds(1, 0, 100 + i) for i in range(10))
    assert timing.finished == pytest.approx(3.0 + expected)
    assert (timing.output_tokens, timing.prompt_tokens) == (11, 100)


def test_decode_steps_are_padded_to_a_cheaper_stair() -> None:
    m = machine()
    device = SimulatedDevice(m.times, group_specs(m.shape, m.fmt), VirtualClock())
    seconds = {r: m.times.seconds(r) for r in (11, 12)}
    assert seconds[11] > seconds[12]
    cheapest = min(m.times.seconds(r) for r in range(11, 65))
    rows = tuple(DecodeRow(i, i, 0, 1, -1, KVView(0, ())) for i in range(11))
    assert device.seconds(StepPlan(0, 16, decode=rows)) == pytest.approx(cheapest, rel=1e-6)


@pytest.mark.parametrize("run_ahead", [True, False])
def test_every_request_is_answered_in_full(run_ahead: bool) -> None:
    requests = chat(80, rate=3.0)
    simulation = Simulation(machine(), Setup(16, run_ahead=run_ahead))
    timings = {t.request_id: t for t in simulation.run(requests)}
    assert len(timings) == len(requests)
    for number, request in enumerate(requests):
        timing = timings[str(number)]
        assert timing.output_tokens == request.output_tokens
        assert request.arrival < timing.first_token <= timing.finished
    assert simulation.scheduler.kv.pools[0].num_used == 0


def test_the_engines_own_loop_gives_the_same_timings() -> None:
    """The simulation's loop leaves out text, and nothing else."""
    from mlxbatch.engine.core import EngineCore
    from mlxbatch.simulate.machine import engine_request

    class Silent:
        eos_token_ids: frozenset[int] = frozenset()
        vocab_size = 1 << 40

        def stream_decoder(self, skip_special_tokens: bool = True) -> Silent:
            return self

        def push(self, token_id: int) -> str:
            return ""

        def finish(self) -> str:
            return ""

    requests = chat(40, rate=2.0)
    ours = Simulation(machine(), Setup(8)).run(requests)
    other = Simulation(machine(), Setup(8))
    core = EngineCore(other.scheduler, other.device, Silent(), clock=other.clock)  # type: ignore[arg-type]
    theirs, following = [], 0
    while following < len(requests) or core.has_unfinished:
        if not core.has_unfinished:
            other.clock.advance_to(requests[following].arrival)
        while following < len(requests) and requests[following].arrival <= other.clock.now:
            core.submit(engine_request(requests[following], following))
            following += 1
        core.step()
        theirs += core.pop_timings()
    assert ours == theirs


def test_a_small_pool_preempts_and_still_answers_everything() -> None:
    m = machine(kv_budget=60 * 16 * 131_072)
    requests = [SimRequest(0.01 * i, 100, 300) for i in range(12)]
    simulation = Simulation(m, Setup(8))
    timings = simulation.run(requests)
    assert len(timings) == 12
    assert simulation.scheduler.num_preemptions > 0
    assert simulation.device.most_pool_bytes <= m.kv_budget


def test_jitter_changes_times_repeatably() -> None:
    requests = chat(20)
    runs = [
        [t.finished for t in Simulation(machine(), Setup(8, jitter=0.3, seed=s)).run(requests)] for s in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


# -- baselines ---------------------------------------------------------------------------------------------


def test_static_batching_waits_for_a_full_batch_and_for_its_longest_answer() -> None:
    m = machine()
    requests = [SimRequest(float(i), 10, 2 + 10 * (i % 2)) for i in range(4)]
    result = static_batching(m, requests, TARGETS, rows=2)
    prefill = m.times.seconds(0, 20, prefill_context=5)
    steps = [m.times.seconds(2, 0, 10 + i) for i in range(1, 12)]
    assert result.requests == 4
    # the first pair is complete at 1 s and runs to its longest answer; the second may start at 3 s
    assert result.seconds == pytest.approx(3.0 + prefill + sum(steps), rel=1e-9)
    assert result.ttft.p99 >= 1.0


def test_dynamic_batching_starts_after_its_window() -> None:
    m = machine()
    alone = dynamic_batching(m, [SimRequest(5.0, 10, 2)], TARGETS, rows=8, window=0.5)
    assert alone.ttft.p50 == pytest.approx(0.0 + m.times.seconds(0, 10, prefill_context=5), rel=1e-9)
    two = [SimRequest(5.0, 10, 2), SimRequest(5.2, 10, 2), SimRequest(9.0, 10, 2)]
    result = dynamic_batching(m, two, TARGETS, rows=8, window=0.5)
    assert result.requests == 3
    assert result.steps == 2 * 2  # two batches of a prefill and a decode


def test_iteration_level_scheduling_beats_whole_batches_under_load() -> None:
    m, requests = machine(), chat(120, rate=1.5)
    ours = simulate(m, Setup(32), requests, TARGETS)
    for other in (
        static_batching(m, requests, TARGETS, rows=32),
        dynamic_batching(m, requests, TARGETS, rows=32),
    ):
        assert ours.goodput > other.goodput
        assert ours.ttft.p50 < other.ttft.p50
    assert whole_prompts(m, requests, TARGETS, rows=32).requests == 120
