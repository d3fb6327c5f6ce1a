"""One running or waiting answer: its tokens, how far they are computed, and where its K and V are."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from mlxbatch.request import Priority, Request
from mlxbatch.scheduling.groups import SequenceKV
from mlxbatch.scheduling.prefix import BlockHash


class Status(enum.Enum):
    WAITING = "waiting"  # in the queue; holds neither slot nor blocks
    RUNNING = "running"  # holds a slot
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the `n` answers to a request. All lengths are counts of positions from 0:

        0 ...... kv.flushed ...... num_computed ...... len(token_ids) ... num_tokens
        in pool  | in the tail    | to be computed    | sampled, not yet read back

    `num_computed` includes steps that were launched and may still run.
    """

    seq_id: int
    request: Request
    index: int
    max_length: int  # prompt + output tokens at which it ends
    eos_token_ids: frozenset[int]
    token_ids: list[int]
    num_prompt_tokens: int
    seed: int
    status: Status = Status.WAITING
    num_computed: int = 0
    in_flight: int = 0
    sample_index: int = -1  # of the newest token in flight, among the samples of its step
    slot: int = -1
    kv: SequenceKV | None = None
    prompt_hashes: list[BlockHash] = field(default_factory=list)
    siblings: list[Sequence] = field(default_factory=list)  # forks that wait for this prompt
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_cached: int = 0
    num_preemptions: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    finished_at: float | None = None
    seen: bool = False  # its first token has been delivered

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.in_flight

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def wants_step(self) -> bool:
        """False once the token in flight is known to be the last."""
        return self.status is Status.RUNNING and self.num_tokens < self.max_length

    @property
    def is_decoding(self) -> bool:
        return self.num_tokens - self.num_computed == 1

    @property
    def memory(self) -> SequenceKV:
        """What a running sequence holds. Raises RuntimeError for one that holds nothing."""
        if self.kv is None:
            raise RuntimeError(f"sequence {self.seq_id} holds no memory: it is {self.status.value}")
        return self.kv

    @property
    def interactive(self) -> bool:
        return self.request.priority is Priority.INTERACTIVE

    def start(self, slot: int, kv: SequenceKV, num_computed: int, now: float) -> None:
        self.status = Status.RUNNING
        self.slot = slot
        self.kv = kv
        self.num_computed = num_computed
        if self.first_scheduled is None:
            self.first_scheduled = now
            self.num_cached = num_computed

    def preempt(self) -> None:
        """Back to the queue. A token in flight stays in flight and will be appended when it is read."""
        self.status = Status.WAITING
        self.slot = -1
        self.kv = None
        self.num_computed = 0
        self.num_preemptions += 1

    def append(self, token_id: int, now: float) -> None:
        """A sampled token was read back."""
        self.token_ids.append(token_id)
        self.in_flight -= 1
        if self.first_token is None:
            self.first_token = now

    def finish(
        self, reason: str, now: float, *, stop_reason: str | int | None = None, error: str | None = None
    ) -> None:
        self.status = Status.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.error = error
        self.finished_at = now

    def suppressed_ids(self) -> tuple[int, ...]:
        """Ids that must not be sampled next, because min_tokens are not reached."""
        params = self.request.params
        if self.num_tokens - self.num_prompt_tokens >= params.min_tokens:
            return ()
        ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            ids |= self.eos_token_ids
        return tuple(sorted(ids))

    def stop_for(self, token_id: int) -> tuple[str, int | None] | None:
        """(finish_reason, stop_reason) if the sequence ends with this, its newest token."""
        params, length = self.request.params, len(self.token_ids)
        if length - self.num_prompt_tokens >= params.min_tokens:
            if token_id in self.eos_token_ids and not params.ignore_eos:
                return "stop", None
            if token_id in params.stop_token_ids:
                return "stop", token_id
        if length >= self.max_length:
            return "length", None
        return None
