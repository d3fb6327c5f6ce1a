"""S, stairs and the cap on rows."""

from __future__ import annotations

import math

import pytest

from mlxbatch.capacity.saturation import choose_cap, fit_saturation, padded_rows, stairs


def curve(s: float, rows: int = 64) -> dict[int, float]:
    """Step times of a machine that follows the formula exactly, scaled so that one row takes a second."""
    one = s * -math.expm1(-1.0 / s)
    return {b: b * one / (s * -math.expm1(-b / s)) for b in range(1, rows + 1)}


@pytest.mark.parametrize("s", [0.5, 2.0, 7.0, 20.0, 100.0])
def test_the_fit_recovers_a_machine_that_follows_the_formula(s: float) -> None:
    # efficiency is over one row's throughput, which is a little below the fitted curve's slope
    times = {b: b / (s * -math.expm1(-b / s)) for b in range(1, 65)}
    times[1] = 1.0
    fit = fit_saturation(times)
    assert fit.s == pytest.approx(s, rel=0.02)
    assert fit.residual < 0.08
    assert math.exp(-fit.knee / fit.s) == pytest.approx(0.1)


def test_linear_and_flat_machines() -> None:
    assert fit_saturation(dict.fromkeys(range(1, 65), 1.0)).s > 1000  # rows are free
    assert fit_saturation({b: float(b) for b in range(1, 65)}).s < 1.3  # rows gain nothing
    with pytest.raises(ValueError, match="one row"):
        fit_saturation({2: 1.0})


STAIRS = {
    **{b: 1.0 + 0.4 * (b - 1) for b in range(1, 12)},  # pays row by row: 5.0 at 11
    **dict.fromkeys(range(12, 33), 4.0),  # one tile: cheaper than 11 rows
    **dict.fromkeys(range(33, 65), 8.0),
}


def test_rows_are_padded_up_to_a_cheaper_stair() -> None:
    padded = padded_rows(STAIRS)
    assert padded[8] == 8  # 3.8, below the tile
    assert padded[9] == padded[11] == padded[12] == 12  # no further than needed
    assert padded[33] == 33


def test_stairs_end_where_the_next_row_costs_more() -> None:
    edges = stairs(STAIRS)
    assert [e.rows for e in edges][-2:] == [32, 64]
    assert edges[-2].throughput == 8.0


def test_the_cap_looks_past_a_falling_step_and_fills_the_stair() -> None:
    cap = choose_cap(STAIRS)
    assert cap.rows == 32  # beyond a stretch in which throughput hardly rises, and no further: 64 gives the same
    assert "5%" in cap.reason


def test_the_cap_looks_past_a_flat_stretch() -> None:
    times = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0, 6: 5.0, 7: 5.0, 8: 5.0, 16: 5.0}
    assert choose_cap(times).rows == 16


def test_the_cap_keeps_to_the_time_target() -> None:
    assert choose_cap(STAIRS, tpot_target=4.0).rows == 32
    assert choose_cap(STAIRS, tpot_target=3.9).rows == 7  # 8 rows give 2% more
    assert choose_cap(STAIRS, tpot_target=0.5).rows == 1
    assert "longer than the target" in choose_cap(STAIRS, tpot_target=0.5).reason


def test_within_a_wide_stair_the_target_may_still_be_met() -> None:
    times = {b: 1.0 + 0.001 * b for b in range(1, 17)}
    cap = choose_cap(times, tpot_target=1.0085)
    assert cap.rows == 8


def test_the_most_that_is_allowed_binds() -> None:
    assert choose_cap(STAIRS, most=16).rows <= 16
    assert choose_cap(dict.fromkeys(range(1, 65), 1.0), most=48).rows == 48


def test_throughput_at_the_cap_is_within_the_share_of_the_best() -> None:
    for s in (1.5, 5.0, 12.0, 40.0):
        times = curve(s)
        best = max(b / t for b, t in times.items())
        rows = choose_cap(times).rows
        assert rows / times[rows] >= best / 1.05
