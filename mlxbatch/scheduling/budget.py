"""How many prompt tokens one step may carry beside its decode rows."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from mlxbatch.scheduling.sequence import Sequence


class StepLoad(NamedTuple):
    """What a step would carry: its decode rows, prompts that want to move on, and tokens left for these."""

    decodes: Seq[Sequence]
    prompts: Seq[Sequence]
    available: int
    now: float


class PrefillGrant(NamedTuple):
    """`off_target`: the step will miss the latency target, with these tokens or even without them."""

    num_tokens: int
    off_target: bool = False


class PrefillBudget(Protocol):
    def grant(self, load: StepLoad) -> PrefillGrant:
        """At most `available` tokens. Asked once for every step, whether or not a prompt waits."""
        ...


class WholeStep:
    """Everything that max_num_batched_tokens leaves: no latency target."""

    def grant(self, load: StepLoad) -> PrefillGrant:
        return PrefillGrant(load.available)
