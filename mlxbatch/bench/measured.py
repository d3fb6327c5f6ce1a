"""What one run of a workload took."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Measured:
    """Seconds and tokens. An iteration that computes any prompt tokens counts as prefill, with all its time.

    `token_gaps` are the seconds between consecutive tokens of chat requests; `held_over_live` is KV memory held
    over that of live tokens, averaged over iterations.
    """

    total: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    token_gaps: list[float] = field(default_factory=list)
    held_over_live: float = 0.0

    def add_iteration(self, seconds: float, *, has_prefill: bool, tokens: int) -> None:
        if has_prefill:
            self.prefill_seconds += seconds
        else:
            self.decode_seconds += seconds
            self.decode_tokens += tokens

    @property
    def decode_seconds_per_token(self) -> float:
        return self.decode_seconds / self.decode_tokens if self.decode_tokens else float("nan")

    def p99_ttft(self) -> float:
        return float(np.percentile(self.ttft, 99)) if self.ttft else float("nan")

    def p99_gap(self) -> float:
        return float(np.percentile(self.token_gaps, 99)) if self.token_gaps else float("nan")


class ChatClock:
    """Turns the moments at which a chat's tokens came into TTFT and gaps."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self._last: dict[str, float] = {}

    def arrived(self, name: str, moment: float) -> None:
        self._last[name] = moment

    def token(self, name: str, moment: float, *, first: bool) -> None:
        gap = moment - self._last[name]
        (self._measured.ttft if first else self._measured.token_gaps).append(gap)
        self._last[name] = moment
