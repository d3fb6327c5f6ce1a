"""The roofline against public figures, and the staircase of Apple's quantised matmuls."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from mlxbatch.capacity.calibration import FITTED, fit, predict, public_figures
from mlxbatch.capacity.chips import find_chip
from mlxbatch.capacity.known_models import find_shape
from mlxbatch.capacity.model_shape import Experts, Linear, Quantization
from mlxbatch.capacity.roofline import Roofline, vector_limit

FOUR_BIT = Quantization(4, 64)


def roofline(chip: str = "m2-ultra", model: str = "llama-3.1-8b", bits: int = 4) -> Roofline:
    return Roofline(
        find_shape(model), find_chip(chip), FITTED, quantization=Quantization(bits) if bits < 16 else None
    )


def test_the_factors_are_what_the_fit_gives_and_nothing_else() -> None:
    assert astuple(fit()) == pytest.approx(astuple(FITTED), rel=1e-3)


def test_fitted_figures_are_met() -> None:
    fitted = [f for f in public_figures() if f.fit]
    assert len(fitted) == 9
    assert all(f.chip == "m2-ultra" for f in fitted)
    for figure in fitted:
        assert predict(figure) == pytest.approx(figure.value, rel=0.02), figure.what


def test_predicted_figures_of_dense_models_stay_within_half() -> None:
    """Errors of other chips are printed by `python -m mlxbatch.capacity.calibration`; this only guards them."""
    for figure in public_figures():
        if not figure.fit and figure.model not in ("granite-4.0-tiny-preview", "qwen3-next-80b-a3b", "qwen3-30b-a3b"):
            assert predict(figure) == pytest.approx(figure.value, rel=0.5), figure.what


@pytest.mark.parametrize(
    ("chip", "limits"),
    [("m2-ultra", (32, 18, 12)), ("m2-max", (14, 10, 6)), ("m3-max", (18, 12, 10)), ("m3-ultra", (32, 18, 12))],
)
def test_rows_at_which_mlx_changes_kernels(chip: str, limits: tuple[int, int, int]) -> None:
    found = tuple(vector_limit(find_chip(chip), d, d) for d in (2048, 4096, 8192))
    assert found == limits
    assert vector_limit(find_chip(chip), 2048, 4096) == limits[1]


def test_on_an_m2_ultra_rows_pay_one_by_one_and_then_by_tiles_of_32() -> None:
    roof, matrix = roofline(), Linear(4096, 14336)
    times = {rows: roof.linear_seconds(matrix, rows) for rows in range(1, 66)}
    assert times[8] == pytest.approx(2 * times[4], rel=0.01)
    assert times[12] == times[32]
    assert times[33] == times[64] == pytest.approx(2 * times[32])
    assert times[11] > times[12]  # so 11 rows are better run as 12


def test_on_an_m3_max_the_first_rows_are_free() -> None:
    roof, matrix = roofline("m3-max"), Linear(5120, 17408)
    assert roof.linear_seconds(matrix, 4) == roof.linear_seconds(matrix, 1)
    assert roof.linear_seconds(matrix, 9) > 1.5 * roof.linear_seconds(matrix, 4)


def test_sixteen_bit_matmuls_pay_for_a_tile_of_64_rows() -> None:
    roof, matrix = roofline(bits=16), Linear(4096, 14336)
    assert roof.linear_seconds(matrix, 2) == roof.linear_seconds(matrix, 64) > roof.linear_seconds(matrix, 1)


def test_distinct_experts() -> None:
    experts = Experts(8, 2, (Linear(4, 4),))
    assert experts.distinct(1) == pytest.approx(2)
    assert experts.distinct(2) == pytest.approx(8 * (1 - 0.75**2))
    assert experts.distinct(1000) == pytest.approx(8)


def test_a_mixture_gains_less_from_rows_than_dense_models_of_its_size() -> None:
    mixture = roofline(model="mixtral-8x7b")
    gain = {rows: rows * mixture.seconds(1) / mixture.seconds(rows) for rows in (8, 16, 32)}
    dense = roofline()
    for rows, value in gain.items():
        assert value < rows * dense.seconds(1) / dense.seconds(rows)


def test_attention_grows_with_context_and_a_window_ends_it() -> None:
    llama = roofline()
    assert llama.seconds(4, 0, 8192) > llama.seconds(4, 0, 1024)
    gemma = roofline(model="gemma-3-27b")
    full = gemma.decode_attention_seconds(65_536) / gemma.decode_attention_seconds(32_768)
    assert full < 2.0
    assert roofline(model="gpt-oss-20b").seconds(1, 512, 0, prefill_context=4352) > roofline(
        model="gpt-oss-20b"
    ).seconds(1, 512)


def test_quantised_kv_is_read_faster() -> None:
    shape, chip = find_shape("llama-3.1-8b"), find_chip("m2-ultra")
    plain, small = (Roofline(shape, chip, FITTED, kv_bits=bits) for bits in (16, 8))
    assert small.decode_attention_seconds(4096) == pytest.approx(plain.decode_attention_seconds(4096) / 2)


def test_nothing_to_do_takes_no_time() -> None:
    assert roofline().seconds(0) == 0.0
