"""The work that both engines are given: token ids and lengths, the same for both, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

FIRST_ID = 1000  # below lie special tokens and single bytes


@dataclass(frozen=True, slots=True)
class Job:
    """One request. Lengths are fixed: EOS is ignored. `arrives` is seconds after the start; `chat` is interactive."""

    prompt: tuple[int, ...]
    max_tokens: int
    arrives: float = 0.0
    chat: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """`prefix_len`: the first tokens of every prompt are the same. `rows` is max_num_seqs on our side and
    completion_batch_size on mlx-lm's; None leaves both at their defaults. `in_flight`: the batch run's client sends
    its next job when fewer than so many are unfinished; None sends all at the start."""

    name: str
    title: str
    jobs: tuple[Job, ...]
    rows: int | None = 16
    prefix_len: int = 0
    in_flight: int | None = None
    max_num_batched_tokens: int = 512
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(job.prompt) for job in self.jobs)

    @property
    def output_tokens(self) -> int:
        return sum(job.max_tokens for job in self.jobs)


class _Ids:
    def __init__(self, seed: int, vocab: int) -> None:
        self._numbers = random.Random(seed)
        self._vocab = vocab

    def take(self, count: int) -> tuple[int, ...]:
        low = min(FIRST_ID, self._vocab // 2)
        return tuple(self._numbers.randrange(low, self._vocab) for _ in range(count))

    def between(self, low: int, high: int) -> int:
        return self._numbers.randint(low, high)


def uniform(vocab: int) -> Workload:
    ids = _Ids(1, vocab)
    jobs = tuple(Job(ids.take(ids.between(35, 45)), 64) for _ in range(32))
    return Workload("uniform", "32 prompts of about 40 tokens, 64 new tokens each, 16 rows", jobs)


def ragged(vocab: int) -> Workload:
    ids = _Ids(2, vocab)
    jobs = [Job(ids.take(ids.between(20, 60)), ids.between(8, 128)) for _ in range(31)]
    jobs.insert(4, Job(ids.take(2000), 128))
    return Workload("ragged", "one prompt of 2,000 tokens among 31 short ones, 8 to 128 new tokens", tuple(jobs))


def shared_prefix(vocab: int) -> Workload:
    ids = _Ids(3, vocab)
    system = ids.take(600)
    jobs = tuple(Job(system + ids.take(ids.between(15, 30)), 32) for _ in range(32))
    return Workload(
        "shared-prefix", "32 questions behind one prompt of 600 tokens, 32 new tokens", jobs, prefix_len=600
    )


def latency(vocab: int) -> Workload:
    """Chat requests that arrive, one every 4 s, while a batch run with long prompts keeps the engine busy."""
    ids = _Ids(4, vocab)
    batch = [Job(ids.take(ids.between(400, 800)), ids.between(8, 40)) for _ in range(32)]
    chats = [Job(ids.take(ids.between(20, 60)), 32, arrives=2.0 + 4.0 * i, chat=True) for i in range(8)]
    title = "8 chat requests during a batch run of 32 prompts of 400 to 800 tokens, 16 of them in flight"
    return Workload("latency", title, (*batch, *chats), rows=None, in_flight=16)


WORKLOADS: Mapping[str, Callable[[int], Workload]] = {
    "uniform": uniform,
    "ragged": ragged,
    "shared-prefix": shared_prefix,
    "latency": latency,
}
