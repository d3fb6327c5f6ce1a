"""When the jobs of a workload reach an engine: chats at their time, batch jobs as the run's client sends them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from mlxbatch.bench.workloads import Job, Workload


class Arrivals:
    """Names jobs by their place in the workload. `chats` are the names of the interactive ones."""

    def __init__(self, workload: Workload) -> None:
        named = [(str(i), job) for i, job in enumerate(workload.jobs)]
        self.chats = frozenset(name for name, job in named if job.chat)
        self._chats = deque(sorted(((n, j) for n, j in named if j.chat), key=lambda item: item[1].arrives))
        self._batch = deque(sorted(((n, j) for n, j in named if not j.chat), key=lambda item: item[1].arrives))
        self._in_flight = workload.in_flight or len(named)
        self._unfinished: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._chats or self._batch)

    def due(self, now: float) -> Iterator[tuple[str, Job]]:
        """Jobs to submit, `now` seconds after the start."""
        while self._chats and self._chats[0][1].arrives <= now:
            yield self._chats.popleft()
        while self._batch and self._batch[0][1].arrives <= now and len(self._unfinished) < self._in_flight:
            name, job = self._batch.popleft()
            self._unfinished.add(name)
            yield name, job

    def finished(self, name: str) -> None:
        self._unfinished.discard(name)
