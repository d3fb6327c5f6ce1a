"""The prefill chunk of a step from latency targets, through the step-cost model."""

from __future__ import annotations

from mlxbatch.capacity.cost_model import StepCostModel
from mlxbatch.scheduling.budget import PrefillGrant, StepLoad

EVERY = 4  # steps after which a block is prefilled although the target leaves no room


class LatencyBudget:
    """Keeps steps within `tpot_target` seconds while prompts are prefilled beside decode rows.

    - As many prompt tokens as the model says fit; all of them when no decode row would be delayed.
    - No room: one block in every EVERY steps, reported off target, so that prompts always move on.
    - `ttft_target` trades the other way: when the first prompt would miss it at this pace, its share is raised,
      and the step is reported off target. A prompt that has missed it already gains nothing from haste.
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

    def grant(self, load: StepLoad) -> PrefillGrant:
        if self._tpot is None or not load.num_decode:
            return PrefillGrant(load.available)
        context = load.context_tokens / load.num_decode
        if not load.available:
            return PrefillGrant(0, off_target=self._cost.predict(load.num_decode, 0, context) > self._tpot)
        size = self._cost.prefill_budget(
            load.num_decode, context, self._tpot, most=load.available, block_size=self._block
        )
        hurried = min(load.available, self._hurried(load))
        if hurried > size:
            self._without = 0
            return PrefillGrant(hurried, off_target=True)
        if size:
            self._without = 0
            return PrefillGrant(size)
        self._without += 1
        late = self._cost.predict(load.num_decode, 0, context) > self._tpot
        if self._without < EVERY:
            return PrefillGrant(0, off_target=late)
        self._without = 0
        return PrefillGrant(min(self._block, load.available), off_target=True)

    def _hurried(self, load: StepLoad) -> int:
        """Tokens a step that the first prompt needs to meet its target; 0 if there is none or it is missed."""
        if self._ttft is None or self._tpot is None:
            return 0
        left = self._ttft - load.waited
        if left <= 0.0:
            return 0
        steps = max(1, int(left / self._tpot))
        return -(-load.prompt_tokens // (steps * self._block)) * self._block
