"""The step-cost model: sources, drift, and how much prefill fits a step."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mlxbatch.capacity.calibration import FITTED
from mlxbatch.capacity.chips import find_chip
from mlxbatch.capacity.cost_model import StepCostModel
from mlxbatch.capacity.curve_store import CurveStore
from mlxbatch.capacity.known_models import find_shape
from mlxbatch.capacity.measured_curve import DecodePoint, MeasuredCurve, MeasuredTimes, PrefillPoint
from mlxbatch.capacity.model_shape import Quantization
from mlxbatch.capacity.roofline import Roofline


def roofline_model() -> StepCostModel:
    roof = Roofline(find_shape("llama-3.1-8b"), find_chip("m2-ultra"), FITTED, quantization=Quantization(4))
    return StepCostModel(roof, source="chip table")


def measured() -> MeasuredCurve:
    """0.1 s of fixed cost, 10 ms a row, 1 us a row and cached token, 2 us a chunk token and cached token."""
    rows = (1, 2, 4, 8, 16)
    decode = [DecodePoint(r, c, 0.1 + 0.01 * r + 1e-6 * r * c) for r in rows for c in (64, 1024)]
    prefill = [PrefillPoint(n, s, 0.1 + 0.01 * n + 2e-6 * n * s) for n in (32, 128, 512) for s in (0, 512)]
    return MeasuredCurve("m", "chip", tuple(decode), tuple(prefill), "now", {"dtype": "float32"})


def test_between_and_beyond_measured_points() -> None:
    times = MeasuredTimes(measured())
    assert times.seconds(3, 0, 200) == pytest.approx(0.1 + 0.03 + 1e-6 * 3 * 200, rel=1e-6)
    assert times.seconds(16, 0, 5000) == pytest.approx(0.26 + 1e-6 * 16 * 5000, rel=1e-6)
    assert times.seconds(20, 44, 1000) == pytest.approx(0.1 + 0.64 + 1e-6 * 20 * 1000, rel=1e-6)
    assert times.seconds(0, 300, prefill_context=850) == pytest.approx(3.1 + 2e-6 * 300 * 700, rel=1e-6)
    assert times.seconds(600) == pytest.approx(6.1, rel=1e-6)
    assert times.seconds(0) == 0.0


def test_a_curve_with_one_point_and_bad_curves() -> None:
    one = MeasuredCurve("m", "c", (DecodePoint(1, 64, 0.1),))
    assert MeasuredTimes(one).seconds(4) == pytest.approx(0.4)
    with pytest.raises(ValueError, match="positive"):
        MeasuredCurve("m", "c", (DecodePoint(1, 64, 0.0),))


def test_curves_are_kept_by_model_and_chip(tmp_path: Path) -> None:
    store = CurveStore(tmp_path / "curves")
    assert store.load("m", "chip") is None
    path = store.save(measured())
    assert store.load("m", "chip") == measured()
    assert store.load("m", "other") is None
    path.write_text("{ torn")
    assert store.load("m", "chip") is None
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_slow_drift_is_followed_and_outliers_hardly_count() -> None:
    model, noise = roofline_model(), random.Random(1)
    base = model.times.seconds(8, 0, 1000)
    for _ in range(400):
        model.observe(8, 0, 1000, 1.3 * base * noise.uniform(0.95, 1.05))
    assert model.predict(8, 0, 1000) == pytest.approx(1.3 * base, rel=0.03)
    before = model.predict(8, 0, 1000)
    for _ in range(3):
        model.observe(8, 0, 1000, 50 * base)
    assert model.predict(8, 0, 1000) == pytest.approx(before, rel=0.03)
    assert model.predict(8, 256, 1000) == pytest.approx(model.times.seconds(8, 256, 1000))  # its own drift
    for _ in range(400):
        model.observe(8, 0, 1000, base)
    assert model.predict(8, 0, 1000) == pytest.approx(base, rel=0.03)


def test_one_outlier_among_ten_does_not_bias_the_correction() -> None:
    model = roofline_model()
    base = model.times.seconds(4)
    for step in range(1000):
        model.observe(4, 0, 0, base * (20.0 if step % 10 == 0 else 1.0))
    assert model.predict(4) < 1.2 * base


def test_useless_observations_are_ignored() -> None:
    model = roofline_model()
    model.observe(0, 0, 0, 1.0)
    model.observe(4, 0, 0, 0.0)
    assert model.decode_drift.observations == 0


@pytest.mark.parametrize("target", [0.05, 0.08, 0.1, 0.2, 0.5])
@pytest.mark.parametrize("rows", [0, 1, 8, 24])
def test_the_prefill_budget_keeps_to_the_target(target: float, rows: int) -> None:
    model = roofline_model()
    size = model.prefill_budget(rows, 1000, target, most=512)
    assert size % 16 == 0
    if size:
        assert model.predict(rows, size, 1000) <= target
    larger = [n for n in range(16, 513, 16) if model.predict(rows, n, 1000) <= target]
    assert size >= 0.8 * max(larger, default=0)


def test_no_room_at_all_and_room_for_everything() -> None:
    model = roofline_model()
    assert model.prefill_budget(8, 1000, 1e-4, most=512) == 0
    assert model.prefill_budget(8, 1000, 1e4, most=500) == 500
