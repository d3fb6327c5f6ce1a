"""Where more rows stop paying: the saturation S of a throughput curve, and the cap on rows.

S describes the curve, the cap is what the engine uses; they are different numbers. S comes from one-parameter
least squares of eff(B) = S (1 - exp(-B / S)) to throughput(B) / throughput(1): a machine that gives every row
its full speed has S without bound, one that gives nothing for a second row has S below 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlxbatch.capacity.golden_section import minimum

KNEE = 0.1  # at the knee another row adds this share of what the first one gave
GAIN = 0.05  # a further stair must raise throughput by this share
EDGE = 0.02  # a rise in step time by this share ends a stair
LARGEST_S = 4096.0


@dataclass(frozen=True, slots=True)
class Saturation:
    """`residual` is the root mean square of measured minus fitted efficiency, over the largest efficiency."""

    s: float
    residual: float

    @property
    def knee(self) -> float:
        """Rows at which another row adds a tenth of the first one's throughput: exp(-B / S) = 0.1."""
        return self.s * math.log(1.0 / KNEE)

    def efficiency(self, rows: float) -> float:
        return self.s * -math.expm1(-rows / self.s)


def fit_saturation(seconds: Mapping[int, float]) -> Saturation:
    """S of step times by rows; the map must hold rows 1. Raises ValueError without it."""
    if 1 not in seconds:
        raise ValueError("a saturation fit needs the time of one row")
    gains = [(rows, rows * seconds[1] / time) for rows, time in sorted(seconds.items())]

    def loss(log_s: float) -> float:
        fit = Saturation(math.exp(log_s), 0.0)
        return sum((fit.efficiency(rows) - gain) ** 2 for rows, gain in gains)

    s = math.exp(minimum(loss, math.log(0.05), math.log(LARGEST_S), steps=60))
    error = math.sqrt(loss(math.log(s)) / len(gains)) / max(gain for _, gain in gains)
    return Saturation(s, error)


@dataclass(frozen=True, slots=True)
class Stair:
    """Rows up to `rows` that run at the price of `seconds` a step: fewer are padded to `rows`."""

    rows: int
    seconds: float

    @property
    def throughput(self) -> float:
        return self.rows / self.seconds


def padded_rows(seconds: Mapping[int, float]) -> dict[int, int]:
    """For every number of rows, how many should run: itself, or more if those are cheaper."""
    result: dict[int, int] = {}
    best: int | None = None
    for rows in sorted(seconds, reverse=True):
        if best is None or seconds[rows] <= seconds[best] * (1.0 + 1e-9):
            best = rows
        result[rows] = best
    return result


def stairs(seconds: Mapping[int, float]) -> list[Stair]:
    """The right edges of the staircase, after padding. A smooth curve is a stair at every measured point."""
    padded = padded_rows(seconds)
    edges: list[Stair] = []
    ordered = sorted(seconds)
    for rows, following in zip(ordered, [*ordered[1:], None], strict=True):
        time = seconds[padded[rows]]
        if following is None or seconds[padded[following]] > time * (1.0 + EDGE):
            edges.append(Stair(rows, time))
    return edges


@dataclass(frozen=True, slots=True)
class Cap:
    """The chosen cap on rows and why."""

    rows: int
    reason: str


def choose_cap(
    seconds: Mapping[int, float],
    *,
    tpot_target: float | None = None,
    gain: float = GAIN,
    most: int | None = None,
) -> Cap:
    """The stair edge beyond which no stair raises throughput by `gain`, within the target for a step's time.

    Every later stair is compared with the one held, so a flat or falling step does not end the search. When
    no stair meets the target, the largest number of rows that does; if none does, 1.
    """
    edges = [s for s in stairs(seconds) if most is None or s.rows <= most]
    if not edges:
        rows = max((r for r in seconds if most is None or r <= most), default=1)
        return Cap(rows, "the most that is allowed")
    allowed: Sequence[Stair] = edges
    if tpot_target is not None:
        padded = padded_rows(seconds)
        allowed = [s for s in edges if s.seconds <= tpot_target]
        inside = [r for r in seconds if seconds[padded[r]] <= tpot_target and (most is None or r <= most)]
        if not inside:
            return Cap(1, f"even one row takes longer than the target of {tpot_target * 1e3:.0f} ms")
        if not allowed:
            return Cap(max(inside), f"the most rows within {tpot_target * 1e3:.0f} ms a step")
    held = allowed[0]
    for stair in allowed[1:]:
        if stair.throughput >= held.throughput * (1.0 + gain):
            held = stair
    if tpot_target is not None and held is allowed[-1] and len(allowed) < len(edges):
        return Cap(held.rows, f"the last stair within {tpot_target * 1e3:.0f} ms a step")
    if held is edges[-1]:
        return Cap(held.rows, "throughput still rises at the most rows looked at")
    return Cap(held.rows, f"no later stair raises throughput by {100 * gain:.0f}%")
