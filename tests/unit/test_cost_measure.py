"""`mlxbatch tune` on a simulated device with a virtual clock: it must find the curve that the device has."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from mlxbatch.capacity.measured_curve import MeasuredCurve, MeasuredTimes
from mlxbatch.capacity.model_families import read_shape
from mlxbatch.capacity.saturation import choose_cap
from mlxbatch.engine.core import EngineCore
from mlxbatch.engine.measure import COARSE_ROWS, FINE_ROWS, Measurer
from mlxbatch.engine.snapshot import StepMark
from mlxbatch.simulate.machine import Machine, Setup, Simulation

SHAPE = read_shape(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 100,
    }
)


class Silent:
    eos_token_ids: frozenset[int] = frozenset()
    vocab_size = 50_000

    def stream_decoder(self, skip_special_tokens: bool = True) -> Silent:
        return self

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class Staircase:
    """Rows pay one by one up to 11, a tile of 32 is cheaper; cached tokens cost 0.2 us each."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def seconds(
        self, rows: int, prefill_tokens: int = 0, context: float = 0.0, *, prefill_context: float | None = None
    ) -> float:
        tokens = rows + prefill_tokens
        if not tokens:
            return 0.0
        matrices = 0.01 + 0.002 * tokens if tokens < 12 else 0.025 * (-(-tokens // 32))
        seen = prefill_tokens / 2 if prefill_context is None else prefill_context
        return self.scale * (matrices + 2e-7 * (rows * context + prefill_tokens * seen))


def measure(times: Staircase, *, rows: int = 64, seconds: float = 100.0, jitter: float = 0.0) -> MeasuredCurve:
    machine = Machine(SHAPE, times, kv_budget=1 << 30, max_model_len=4096)
    simulation = Simulation(machine, Setup(rows, 512, jitter=jitter))
    simulation.device._padded = {}  # measuring pads nothing
    core = EngineCore(simulation.scheduler, simulation.device, Silent(), clock=simulation.clock)  # type: ignore[arg-type]
    measurer = Measurer(
        core, most_rows=rows, max_model_len=4096, max_prompt=512, seconds=seconds, clock=simulation.clock
    )
    decode, prefill = measurer.run().points()
    assert not core.has_unfinished
    assert simulation.scheduler.kv.pools[0].num_used == 0
    return MeasuredCurve("m", "c", decode, prefill)


def test_the_curve_of_the_device_is_found() -> None:
    device = Staircase()
    curve = measure(device)
    found = curve.seconds_by_rows()
    assert set(found) == {*FINE_ROWS}
    for rows, seconds in found.items():
        assert seconds == pytest.approx(device.seconds(rows, 0, curve.base_context), rel=0.02)
    times = MeasuredTimes(curve)
    for rows, context in ((8, 1500), (1, 2000), (32, 600)):
        assert times.seconds(rows, 0, context) == pytest.approx(device.seconds(rows, 0, context), rel=0.05)
    assert times.seconds(0, 512) == pytest.approx(device.seconds(0, 512), rel=0.05)
    assert times.seconds(0, 512, prefill_context=900) == pytest.approx(
        device.seconds(0, 512, prefill_context=900), rel=0.05
    )
    assert choose_cap(found).rows == 32


def test_noise_moves_the_cap_and_the_times_little() -> None:
    device = Staircase()
    curve = measure(device, jitter=0.1)
    for rows, seconds in curve.seconds_by_rows().items():
        assert seconds == pytest.approx(device.seconds(rows, 0, curve.base_context), rel=0.15)
    cap = choose_cap(curve.seconds_by_rows()).rows
    best = max(r / device.seconds(r, 0, 64) for r in range(1, 65))
    assert cap / device.seconds(cap, 0, 64) > 0.9 * best


def test_a_slow_machine_is_measured_within_its_time() -> None:
    slow = Staircase(scale=20.0)
    curve = measure(slow, seconds=60.0)
    found = curve.seconds_by_rows()
    assert 1 in found
    assert set(found) < set(COARSE_ROWS)
    for rows, seconds in found.items():
        assert seconds == pytest.approx(slow.seconds(rows, 0, curve.base_context), rel=0.05)


def test_a_busy_machine_is_noticed() -> None:
    machine = Machine(SHAPE, Staircase(), kv_budget=1 << 30, max_model_len=4096)
    spreads = []
    for jitter in (0.0, 0.6):
        simulation = Simulation(machine, Setup(8, 512, jitter=jitter))
        core = EngineCore(simulation.scheduler, simulation.device, Silent(), clock=simulation.clock)  # type: ignore[arg-type]
        measurer = Measurer(core, most_rows=8, max_model_len=4096, max_prompt=512, clock=simulation.clock)
        spreads.append(measurer.run().spread)
    assert spreads[0] == pytest.approx(1.0, abs=0.01)
    assert spreads[1] > 1.2


def test_few_rows() -> None:
    assert set(measure(Staircase(), rows=1).seconds_by_rows()) == {1}
    assert set(measure(Staircase(), rows=6).seconds_by_rows()) == {1, 2, 3, 4, 5, 6}


def test_steps_around_a_flush_do_not_count() -> None:
    """The step before a flush is read early, the one with it late: their times belong to both."""
    core = SimpleNamespace(scheduler=SimpleNamespace(running=[SimpleNamespace(num_computed=40)]))
    slow_clock = itertools.count(0.0, 0.5)  # so that a point ends after the fewest steps
    measurer = Measurer(core, most_rows=8, max_model_len=4096, max_prompt=512, clock=lambda: next(slow_clock))  # type: ignore[arg-type]
    shown = [0.3, 0.3, 0.31, 0.02, 0.6, 0.3, 0.01, 0.6, 0.32, 0.3, 0.02]
    marks = (
        StepMark(number, 0, 8, seconds=seconds, flush=seconds == 0.6) for number, seconds in enumerate(shown)
    )
    seconds, context = measurer._time(marks, 8)
    assert seconds == pytest.approx(0.305)  # of 0.31, 0.3 and 0.32
    assert context == 40
    assert measurer.result.spread == pytest.approx(0.31 / 0.3)
    assert [mark.step for mark in marks] == [10], "the newest step is looked at, but does not count"
