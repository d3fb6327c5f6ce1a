"""The order in which waiting requests are admitted, and its reverse, in which running ones are preempted.

Interactive requests go before batch requests, in every policy. Nothing starves all the same:

- within a class every key is a moment, arrival plus a fixed delay, so that later arrivals cannot pass for ever;
- while a batch request waits, at most INTERACTIVE_STREAK interactive ones are admitted before it;
- a sequence that was preempted MAX_DISPLACED times counts as interactive from then on, at its own arrival.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping
from typing import Protocol

from mlxbatch.request import Priority
from mlxbatch.scheduling.sequence import Sequence

OrderKey = tuple[float, ...]

INTERACTIVE_STREAK = 8
MAX_DISPLACED = 2
RANK_SECONDS = 60.0  # by which one step of rank delays a request
SHORTEST_SECONDS = 0.1  # by which each token of expected output delays a request of the shortest-first policy
PROMPT_WEIGHT = 0.1  # a prompt token against an output token: prefill is that much cheaper
DUE_SECONDS: Mapping[Priority, float] = {Priority.INTERACTIVE: 30.0, Priority.BATCH: 3600.0}  # without a deadline


def service_class(seq: Sequence) -> Priority:
    """The class that a sequence is served in: its own, or interactive once it has lost its place too often."""
    return Priority.INTERACTIVE if seq.num_preemptions >= MAX_DISPLACED else seq.request.priority


class Policy(Protocol):
    """A key that never changes while a sequence waits or while it runs, so that queues stay sorted; lower goes
    first. Its first element is the service class, the second a moment on the engine's clock."""

    def key(self, seq: Sequence) -> OrderKey: ...


class FirstComeFirstServed:
    """By arrival; each step of rank stands for a minute."""

    def key(self, seq: Sequence) -> OrderKey:
        request = seq.request
        return (service_class(seq), request.arrival + RANK_SECONDS * request.rank, seq.seq_id)


class ShortestFirst:
    """By expected work, with ageing: each token of work stands for a fixed delay.

    A long request is passed only by those that arrive within the delay of its extra length: 1,000 tokens more
    than another cost it at most 100 seconds. Expected work is what max_tokens allows.
    """

    def key(self, seq: Sequence) -> OrderKey:
        request = seq.request
        work = seq.max_length - seq.num_prompt_tokens + PROMPT_WEIGHT * seq.num_prompt_tokens
        moment = request.arrival + RANK_SECONDS * request.rank + SHORTEST_SECONDS * work
        return (service_class(seq), moment, seq.seq_id)


class EarliestDue:
    """By deadline, then by rank: the moment by which an answer is wanted goes first.

    A request without a deadline is due after 30 seconds (interactive) or an hour (batch), plus a minute for each
    step of rank; so ranks order requests that arrive together, and waiting makes up for rank.
    """

    def key(self, seq: Sequence) -> OrderKey:
        request, service = seq.request, service_class(seq)
        wanted = DUE_SECONDS[service]
        if request.deadline is not None:
            wanted = request.deadline if service is request.priority else min(request.deadline, wanted)
        return (service, request.arrival + wanted + RANK_SECONDS * request.rank, seq.seq_id)


def make_policy(name: str) -> Policy:
    """The policy called "fcfs", "shortest" or "priority"; raises KeyError for another name."""
    policies: Mapping[str, type[Policy]] = {
        "fcfs": FirstComeFirstServed,
        "shortest": ShortestFirst,
        "priority": EarliestDue,
    }
    return policies[name]()


class WaitingQueue:
    """Sequences in policy order, and whose turn it is when a class has waited long enough."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._items: list[tuple[OrderKey, Sequence]] = []
        self._streak = 0  # interactive admissions since a batch request was admitted or none waited

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, seq in self._items)

    def __contains__(self, seq: Sequence) -> bool:
        return any(other is seq for _, other in self._items)

    @property
    def head(self) -> Sequence | None:
        return self._items[0][1] if self._items else None

    @property
    def batch_turn(self) -> Sequence | None:
        """The batch request that must go next, because enough interactive ones went before it."""
        if self._streak < INTERACTIVE_STREAK:
            return None
        return self._first_batch()

    def candidates(self, limit: int) -> list[Sequence]:
        """The first `limit` in the order of admission: the one whose turn it is, then policy order."""
        first = list(itertools.islice(self, limit))
        turn = self.batch_turn
        return first if turn is None else [turn, *(seq for seq in first if seq is not turn)]

    def add(self, seq: Sequence) -> None:
        bisect.insort(self._items, (self._policy.key(seq), seq), key=lambda item: item[0])

    def remove(self, seq: Sequence) -> None:
        key = self._policy.key(seq)
        at = bisect.bisect_left(self._items, key, key=lambda item: item[0])
        while at < len(self._items) and self._items[at][1] is not seq:
            at += 1
        del self._items[at]

    def admit(self, seq: Sequence) -> None:
        """Remove a sequence that starts to run, and remember whose turn that was."""
        self.remove(seq)
        passed_batch = seq.request.priority is Priority.INTERACTIVE and self._first_batch() is not None
        self._streak = self._streak + 1 if passed_batch else 0

    def _first_batch(self) -> Sequence | None:
        before_batch: OrderKey = (float(Priority.BATCH),)
        at = bisect.bisect_left(self._items, before_batch, key=lambda item: item[0])
        return self._items[at][1] if at < len(self._items) else None
