"""Step times that `mlxbatch tune` measured, and what lies between them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One step of `rows` decode rows, each at `context` cached tokens."""

    rows: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """One step that is a chunk of `tokens` tokens behind `start` cached ones."""

    tokens: int
    start: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredCurve:
    """One model on one machine, as it is stored. Every number of rows is measured at the shortest context."""

    model: str
    chip: str
    decode: tuple[DecodePoint, ...]
    prefill: tuple[PrefillPoint, ...] = ()
    measured_at: str = ""
    details: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        times = [p.seconds for p in self.decode] + [p.seconds for p in self.prefill]
        if not self.decode or min(times) <= 0:
            raise ValueError("a curve needs decode points, and positive times")

    @property
    def base_context(self) -> int:
        return min(p.context for p in self.decode)

    def seconds_by_rows(self) -> dict[int, float]:
        """Step times at the base context."""
        return {p.rows: p.seconds for p in self.decode if p.context == self.base_context}


def _slope(pairs: Iterable[tuple[float, float]]) -> float:
    """Least squares of y = slope * x, never falling."""
    points = list(pairs)
    square = sum(x * x for x, _ in points)
    return max(0.0, sum(x * y for x, y in points) / square) if square else 0.0


def _between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear interpolation. Beyond the last point its slope goes on, unless it falls."""
    if len(xs) == 1:
        return ys[0] * max(1.0, x / xs[0])
    if x <= xs[0]:
        return ys[0]
    at = min(bisect.bisect_left(xs, x), len(xs) - 1)
    slope = (ys[at] - ys[at - 1]) / (xs[at] - xs[at - 1])
    return ys[at - 1] + (slope if x <= xs[-1] else max(slope, 0.0)) * (x - xs[at - 1])


class MeasuredTimes:
    """Times of any step from a curve's points:

        time(rows, n, context, seen) = matrices(rows + n) + rows x context x a + n x (seen - n / 2) x b

    with a and b by least squares over the longer contexts; the attention of a chunk to itself, seen = n / 2, is
    part of its measured time. Where decode rows end, chunks take over: to the matrices a chunk of n tokens is
    n rows.
    """

    def __init__(self, curve: MeasuredCurve) -> None:
        base = curve.base_context
        rows = curve.seconds_by_rows()
        self._attention = _slope(
            (p.rows * (p.context - base), p.seconds - rows[p.rows]) for p in curve.decode if p.rows in rows
        )
        chunks = {p.tokens: p.seconds for p in curve.prefill if p.start == 0}
        self._chunk_attention = _slope(
            (p.tokens * p.start, p.seconds - chunks[p.tokens]) for p in curve.prefill if p.tokens in chunks
        )
        matrices = {r: t - self._attention * r * base for r, t in rows.items()}
        matrices.update({n: t for n, t in chunks.items() if n > max(rows)})
        self._tokens = sorted(matrices)
        self._seconds = [matrices[n] for n in self._tokens]

    def seconds(
        self, rows: int, prefill_tokens: int = 0, context: float = 0.0, *, prefill_context: float | None = None
    ) -> float:
        """The time of a step; `context` is the mean of the decode rows, `prefill_context` as for a Roofline."""
        tokens = rows + prefill_tokens
        if tokens == 0:
            return 0.0
        seen = prefill_tokens / 2 if prefill_context is None else prefill_context
        return (
            _between(self._tokens, self._seconds, tokens)
            + self._attention * rows * context
            + self._chunk_attention * prefill_tokens * (seen - prefill_tokens / 2)
        )
