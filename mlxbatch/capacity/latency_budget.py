"""The prefill chunk of a step from latency targets, through the step-cost model."""

from __future__ import annotations

from mlxbatch.capacity.cost_model import StepCostModel
from mlxbatch.scheduling.budget import PrefillGrant, StepLoad
from mlxbatch.scheduling.sequence import Sequence

EVERY = 4  # steps after which a block is prefilled although the target leaves no room
SPENT = 0.5  # share of the poorest row's credit that one step may spend
BORROWED = 16  # tokens to come whose saving a row may be counted on for
BORROWED_IN_HASTE = 256  # and when a prompt's time to first token is at stake
LONGEST = 10.0  # no step is allowed more than this many times the target, however much credit there is


class LatencyBudget:
    """Keeps every request's time per output token within `tpot_target` seconds while prompts are prefilled.

    TPOT is a mean over a request, so what a row was served faster than the target is credit, and so is what the
    next tokens will save at the pace of steps without prompts, with the rows that are prompts now and the longer
    contexts of then:

        saved  = target x tokens after the first - time since the first token
        credit = saved + (target - pace) x tokens to come after this step, at most BORROWED of them

    The poorest row decides how long a step may take. Steps that keep to their allowance leave every credit at 0
    or more, and at its last token a row's credit is what it saved: the request meets its target. Only an answer
    that ends early can end in debt.

    - As many prompt tokens as the model says fit the allowance; all of them when no decode row is delayed.
    - No room: one block in every EVERY steps, reported off target, so that prompts always move on.
    - `ttft_target` trades the other way: when the first prompt would miss it at this pace, its share is raised, as
      far as rows can make up for it over many tokens, and beyond that to its even share of the steps left; the
      step is reported off target. A prompt that has missed it already gains nothing from haste.
    """

    def __init__(
        self,
        cost: StepCostModel,
        *,
        tpot_target: float | None,
        ttft_target: float | None = None,
        block_size: int = 16,
    ) -> None:
        self._cost = cost
        self._tpot = tpot_target
        self._ttft = ttft_target
        self._block = block_size
        self._without = 0  # steps in a row without a prompt token, while one waited
        self._predicted = 0.0  # seconds of the step granted last, which may still run
        self.allowed = float("inf")  # allowance of the step granted last

    def grant(self, load: StepLoad) -> PrefillGrant:
        if self._tpot is None:
            return PrefillGrant(load.available)
        rows = len(load.decodes)
        context = sum(seq.num_computed for seq in load.decodes) / rows if rows else 0.0
        start = max((seq.num_computed for seq in load.prompts), default=0)
        granted = self._choose(load, rows, context, start)
        wanted = sum(seq.num_to_compute for seq in load.prompts)
        tokens = min(granted.num_tokens, wanted)
        self._predicted = self._cost.predict(rows, tokens, context, prefill_context=start + tokens / 2)
        return granted

    def _choose(self, load: StepLoad, rows: int, context: float, start: int) -> PrefillGrant:
        if not rows:
            self.allowed = float("inf")
            return PrefillGrant(load.available)
        pace = self._cost.predict(rows, 0, context)
        self.allowed = allowance = min(self._allowance(load, pace, BORROWED), LONGEST * (self._tpot or 0.0))
        if not load.prompts:
            return PrefillGrant(0, off_target=pace > allowance)
        size = self._cost.prefill_budget(
            rows, context, allowance, most=load.available, block_size=self._block, start=start
        )
        hurried = min(load.available, self._hurried(load, rows, context, start, pace))
        if hurried > size:
            self._without = 0
            return PrefillGrant(hurried, off_target=True)
        if size:
            self._without = 0
            return PrefillGrant(size)
        self._without += 1
        late = pace > allowance
        if self._without < EVERY:
            return PrefillGrant(0, off_target=late)
        self._without = 0
        return PrefillGrant(min(self._block, load.available), off_target=True)

    def _allowance(self, load: StepLoad, pace: float, borrowed: int) -> float:
        """Seconds that the step may take for the sake of its decode rows; `pace` is a step without prompts."""
        target = self._tpot or 0.0
        coming = self._coming_pace(load, borrowed)
        pace, coming = min(pace, target), min(max(pace, coming), target)
        return min(self._row_allowance(seq, load.now, target, pace, coming, borrowed) for seq in load.decodes)

    def _coming_pace(self, load: StepLoad, tokens: int) -> float:
        """Seconds of a step without prompts, `tokens` steps from now, when today's prompts are rows."""
        rows = [*load.decodes, *load.prompts]
        context = sum(seq.num_tokens for seq in rows) / len(rows) + tokens
        return self._cost.predict(len(rows), 0, context)

    def _row_allowance(
        self, seq: Sequence, now: float, target: float, pace: float, coming: float, borrowed: int
    ) -> float:
        saved = 0.0
        if seq.first_token is not None:
            in_flight = self._predicted if seq.in_flight else 0.0
            saved = target * (seq.num_output_tokens - 1 + seq.in_flight) - (now - seq.first_token) - in_flight
        following = seq.max_length - seq.num_tokens - 1
        credit = saved + (target - coming) * min(following, borrowed)
        if credit < -1e-9:
            return target  # it misses its target whatever this step does
        if following <= 0:
            return target + credit
        if following > borrowed:
            return target + SPENT * credit
        return pace + max(SPENT * credit, min(credit, target - pace))  # what was borrowed is due before long

    def _hurried(self, load: StepLoad, rows: int, context: float, start: int, pace: float) -> int:
        """Tokens a step that the first prompt needs to meet its target; 0 if there is none or it is missed."""
        if self._ttft is None or self._tpot is None:
            return 0
        first = load.prompts[0]
        left = self._ttft - (load.now - first.request.arrival)
        if left <= 0.0:
            return 0
        tokens = first.num_to_compute
        steps = max(1, int(left / self._tpot))
        even_share = -(-tokens // (steps * self._block)) * self._block
        at_once = self._cost.predict(rows, tokens, context, prefill_context=start + tokens / 2)
        if not at_once <= left < 2.0 * at_once:  # there is time, or it is too late
            return even_share
        allowance = self._allowance(load, pace, BORROWED_IN_HASTE)
        most = min(tokens, load.available)
        affordable = self._cost.prefill_budget(
            rows, context, allowance, most=most, block_size=self._block, start=start
        )
        return max(even_share, affordable)
