"""How many prompt tokens one step may carry beside its decode rows."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class StepLoad(NamedTuple):
    """What a step would carry: decode rows, and positions of their context in all; room for `available` prompt
    tokens (0: no prompt waits). Of the first prompt `prompt_tokens` are left; it arrived `waited` seconds ago."""

    num_decode: int
    context_tokens: int
    available: int
    prompt_tokens: int = 0
    waited: float = 0.0


class PrefillGrant(NamedTuple):
    """`off_target`: the step will miss the latency target, with these tokens or even without them."""

    num_tokens: int
    off_target: bool = False


class PrefillBudget(Protocol):
    def grant(self, load: StepLoad) -> PrefillGrant:
        """At most `available` tokens. Asked once for every step that has rows."""
        ...


class WholeStep:
    """Everything that max_num_batched_tokens leaves: no latency target."""

    def grant(self, load: StepLoad) -> PrefillGrant:
        return PrefillGrant(load.available)
