"""How many prompt tokens one step may carry beside its decode rows."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class PrefillGrant(NamedTuple):
    """`off_target`: the latency target left no room, and these tokens are granted all the same."""

    num_tokens: int
    off_target: bool = False


class PrefillBudget(Protocol):
    def grant(self, num_decode: int, context_tokens: int, available: int) -> PrefillGrant:
        """At most `available` tokens, for a step with these decode rows and positions of context in all."""
        ...


class WholeStep:
    """Everything that max_num_batched_tokens leaves: no latency target."""

    def grant(self, num_decode: int, context_tokens: int, available: int) -> PrefillGrant:
        return PrefillGrant(available)
