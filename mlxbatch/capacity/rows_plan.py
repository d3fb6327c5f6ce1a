"""How many rows to run: step time, throughput and cap over the number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxbatch.capacity.chips import Chip
from mlxbatch.capacity.cost_model import StepTimes
from mlxbatch.capacity.measured_curve import MeasuredCurve
from mlxbatch.capacity.model_shape import ModelShape
from mlxbatch.capacity.saturation import Cap, Saturation, choose_cap, fit_saturation, padded_rows

SHOWN_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FIT_ROWS = 64  # the fit looks at rows 1 to 64, like `mlxbatch tune`
UNKNOWN_ROWS = 16  # on a machine that is in no table and was not measured


@dataclass(frozen=True, slots=True)
class RowsLine:
    """One number of rows. `gain` is throughput over that of one row; `padded` the rows that really run."""

    rows: int
    padded: int
    seconds: float
    gain: float
    experts: float | None = None  # distinct experts that one layer touches

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.seconds


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """The curve of one model on one machine at one context, its saturation and the cap it gives."""

    context: float
    lines: tuple[RowsLine, ...]
    saturation: Saturation
    cap: Cap


def plan_rows(
    times: StepTimes,
    shape: ModelShape,
    context: float,
    *,
    tpot_target: float | None = None,
    most: int = 128,
    rows: Sequence[int] = SHOWN_ROWS,
) -> RowsPlan:
    """Look at 1 to `most` rows at `context`. `most` bounds the cap, e.g. by what fits into memory."""
    seconds = {r: times.seconds(r, 0, context) for r in range(1, max(most, FIT_ROWS) + 1)}
    padded = padded_rows(seconds)
    one = seconds[1]
    experts = shape.experts
    lines = tuple(
        RowsLine(
            rows=r,
            padded=padded[r],
            seconds=seconds[padded[r]],
            gain=r * one / seconds[padded[r]],
            experts=None if experts is None else experts.distinct(r),
        )
        for r in rows
        if r in seconds
    )
    saturation = fit_saturation({r: t for r, t in seconds.items() if r <= FIT_ROWS})
    return RowsPlan(context, lines, saturation, choose_cap(seconds, tpot_target=tpot_target, most=most))


def auto_rows(
    chip: Chip | None,
    *,
    moe: bool,
    curve: MeasuredCurve | None = None,
    times: StepTimes | None = None,
    tpot_target: float | None = None,
    context: float = 1024.0,
    most: int = 256,
) -> Cap:
    """What `max_num_seqs=auto` becomes.

    A measured curve decides. Without one the chip table does, lowered to what `times` (the roofline) says of
    the target for a step's time, if one is set.
    """
    if curve is not None:
        cap = choose_cap(curve.seconds_by_rows(), tpot_target=tpot_target, most=most)
        return Cap(cap.rows, f"measured {curve.measured_at or 'before'}: {cap.reason}")
    kind = "mixture-of-experts" if moe else "dense"
    if chip is None:
        return Cap(min(most, UNKNOWN_ROWS), "this machine is in no table and was not measured")
    rows = min(most, chip.default_rows(moe=moe))
    if tpot_target is not None and times is not None:
        seconds = {r: times.seconds(r, 0, context) for r in range(1, rows + 1)}
        lowered = choose_cap(seconds, tpot_target=tpot_target, most=rows)
        if lowered.rows < rows:
            return Cap(lowered.rows, f"{chip.name}, {kind}, predicted: {lowered.reason}")
    return Cap(rows, f"chip table, {kind} model on {chip.name}")
