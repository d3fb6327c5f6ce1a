"""What one run of a workload took."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Measured:
    """Seconds and tokens. An iteration that computes any prompt tokens counts as prefill, with all its time.

    `token_gaps` are the seconds between consecutive tokens of chat requests, `tpot` their mean for each request;
    `held_over_live` is KV memory held
    over that of live tokens, averaged over iterations.
    """

    total: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
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

    def p99(self, name: str) -> float:
        """Of `ttft`, `tpot` or `token_gaps`."""
        values: list[float] = getattr(self, name)
        return float(np.percentile(values, 99)) if values else float("nan")


class ChatClock:
    """Turns the moments at which a chat's tokens came into TTFT, TPOT and gaps."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self._arrived: dict[str, float] = {}
        self._tokens: dict[str, list[float]] = {}

    def arrived(self, name: str, moment: float) -> None:
        self._arrived[name] = moment

    def token(self, name: str, moment: float) -> None:
        self._tokens.setdefault(name, []).append(moment)

    def close(self) -> None:
        """All tokens have come."""
        for name, moments in self._tokens.items():
            gaps = [after - before for before, after in itertools.pairwise(moments)]
            self._measured.ttft.append(moments[0] - self._arrived[name])
            self._measured.token_gaps += gaps
            if gaps:
                self._measured.tpot.append(sum(gaps) / len(gaps))
