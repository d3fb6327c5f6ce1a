"""The time of a step, as the scheduler asks for it: a source of times, corrected by what is observed."""

from __future__ import annotations

import math
import statistics
from typing import Protocol

DRIFT_RATE = 0.02  # share of each (bounded) error that the correction takes over
DRIFT_BOUND = 0.3  # a step counts as at most this far off, in log time: a hiccup moves the correction by 0.6%
DRIFT_LIMIT = math.log(1000.0)
FIRST_STEPS = 5  # their median is taken over as it is, so that a source that is far off is soon corrected


class StepTimes(Protocol):
    """Where times come from: a Roofline or a MeasuredCurve. `context` is the mean of the decode rows."""

    def seconds(
        self, rows: int, prefill_tokens: int = 0, context: float = 0.0, *, prefill_context: float | None = None
    ) -> float: ...


class GuessedTimes:
    """Times for a machine in no table, before anything was measured: only their shape means anything, and drift
    soon gives them their size."""

    def seconds(
        self, rows: int, prefill_tokens: int = 0, context: float = 0.0, *, prefill_context: float | None = None
    ) -> float:
        return 0.03 + 0.01 * rows + 0.005 * prefill_tokens if rows + prefill_tokens else 0.0


class Drift:
    """A slowly moving factor between predicted and observed times, for one kind of step.

    Works on log(observed / predicted), and bounds each error before averaging (Huber's psi), so that one step
    that took ten times as long (a page-in, another process) hardly counts, while a lasting change is followed
    with a time constant of 1 / DRIFT_RATE steps.
    """

    def __init__(self) -> None:
        self._log = 0.0
        self._first: list[float] = []
        self.observations = 0

    @property
    def factor(self) -> float:
        return math.exp(self._log)

    def observe(self, predicted: float, observed: float) -> None:
        """`predicted` is without this factor."""
        if predicted <= 0.0 or observed <= 0.0:
            return
        ratio = math.log(observed / predicted)
        self.observations += 1
        if len(self._first) < FIRST_STEPS:
            self._first.append(ratio)
            self._log = statistics.median(self._first)
        else:
            self._log += DRIFT_RATE * min(max(ratio - self._log, -DRIFT_BOUND), DRIFT_BOUND)
        self._log = min(max(self._log, -DRIFT_LIMIT), DRIFT_LIMIT)


class StepCostModel:
    """Predicts step times from a source, times the drift of decode-only and of mixed steps."""

    def __init__(self, times: StepTimes, *, source: str) -> None:
        self.times = times
        self.source = source  # "tuned", "chip table" or "guess", for the display
        self.decode_drift = Drift()
        self.mixed_drift = Drift()

    def _drift(self, prefill_tokens: int) -> Drift:
        return self.mixed_drift if prefill_tokens else self.decode_drift

    def predict(
        self, rows: int, prefill_tokens: int = 0, context: float = 0.0, *, prefill_context: float | None = None
    ) -> float:
        """Seconds of a step of `rows` decode rows at `context` cached tokens on average, beside
        `prefill_tokens` tokens of chunks that see `prefill_context` tokens each on average."""
        seconds = self.times.seconds(rows, prefill_tokens, context, prefill_context=prefill_context)
        return seconds * self._drift(prefill_tokens).factor

    def observe(
        self, rows: int, prefill_tokens: int, context: float, seconds: float, *, prefill_context: float | None = None
    ) -> None:
        """A step took `seconds`. Steps of a warming engine (compilation) should not be passed in."""
        predicted = self.times.seconds(rows, prefill_tokens, context, prefill_context=prefill_context)
        self._drift(prefill_tokens).observe(predicted, seconds)

    def prefill_budget(
        self, rows: int, context: float, seconds: float, *, most: int, block_size: int = 16, start: int = 0
    ) -> int:
        """The most prompt tokens, in whole blocks and at most `most`, that a step can take in beside its
        decode rows within `seconds`, behind `start` cached ones. 0 when not even one block fits.

        Step times are not monotonic in tokens (a stair may be cheaper than the slope before it), so sizes are
        tried from the largest down, by halving steps first and by blocks within the last one.
        """

        def fits(size: int) -> bool:
            return self.predict(rows, size, context, prefill_context=start + size / 2) <= seconds

        if fits(most):
            return most
        step = 1 << max(0, (most // block_size).bit_length() - 1)
        best = 0
        while step:  # the largest multiple of blocks in the rising part
            size = best + step * block_size
            if size <= most and fits(size):
                best = size
            step //= 2
        # A tile's edge beyond a slope: the next few blocks may be cheaper again.
        for size in range(best + block_size, min(most, best + 8 * block_size) + 1, block_size):
            if fits(size):
                best = size
        return best
