"""The order in which waiting requests are admitted, and its reverse, in which running ones are preempted."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Protocol

from mlxbatch.scheduling.sequence import Sequence

OrderKey = tuple[float, ...]


class Policy(Protocol):
    """A key that never changes while a sequence lives, so that queues stay sorted; lower goes first."""

    def key(self, seq: Sequence) -> OrderKey: ...


class FirstComeFirstServed:
    """Interactive before batch, then by rank, arrival and position in the request."""

    def key(self, seq: Sequence) -> OrderKey:
        request = seq.request
        return (request.priority, request.rank, request.arrival, seq.seq_id)


class WaitingQueue:
    """Sequences in policy order."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._items: list[tuple[OrderKey, Sequence]] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, seq in self._items)

    @property
    def head(self) -> Sequence | None:
        return self._items[0][1] if self._items else None

    def add(self, seq: Sequence) -> None:
        bisect.insort(self._items, (self._policy.key(seq), seq), key=lambda item: item[0])

    def remove(self, seq: Sequence) -> None:
        key = self._policy.key(seq)
        at = bisect.bisect_left(self._items, key, key=lambda item: item[0])
        while at < len(self._items) and self._items[at][1] is not seq:
            at += 1
        del self._items[at]
