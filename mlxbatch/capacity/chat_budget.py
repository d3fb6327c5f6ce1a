"""The prefill chunk of a step when no latency target is set: batch prompts make way for running chats."""

from __future__ import annotations

from mlxbatch.capacity.cost_model import StepCostModel
from mlxbatch.request import Priority
from mlxbatch.scheduling.budget import PrefillGrant, StepLoad
from mlxbatch.scheduling.policy import service_class

SLOWDOWN = 2.0  # of a chat's tokens, by the prompts of batch requests


class ChatBudget:
    """While an interactive request is decoding, or its prompt is computed, prompts of batch requests may at most
    double the time of a step.

    So half of the machine still goes to prefill, in small chunks; a chunk of max_num_batched_tokens beside a chat
    would make each of its tokens, the first included, wait for as long as dozens of them take. Prompts of interactive
    requests are computed at once, and one block always moves on.
    """

    def __init__(self, cost: StepCostModel, *, block_size: int = 16) -> None:
        self._cost = cost
        self._block = block_size

    def grant(self, load: StepLoad) -> PrefillGrant:
        if not load.prompts:
            return PrefillGrant(load.available)
        decoding = any(seq.interactive for seq in load.decodes)
        first = [seq for seq in load.prompts if service_class(seq) is Priority.INTERACTIVE]
        chats = sum(seq.num_to_compute for seq in first)
        if not (decoding or chats):
            return PrefillGrant(load.available)
        rows = len(load.decodes)
        context = sum(seq.num_computed for seq in load.decodes) / rows if rows else 0.0
        size = self._cost.prefill_budget(
            rows,
            context,
            SLOWDOWN * self._cost.predict(rows, 0 if decoding else chats, context),
            most=load.available,
            block_size=self._block,
            start=load.prompts[0].num_computed,
        )
        others = self._block if len(first) < len(load.prompts) else 0
        return PrefillGrant(min(load.available, max(size, chats + others, self._block)))
