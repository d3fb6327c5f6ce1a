"""Iteration-level scheduling: who is in the next step, with how many tokens, and in which blocks.

`plan()` may be called while the step before still runs: it counts tokens in flight. The order within a plan
is fixed, because each part relies on the one before it:

    rebalance   move blocks between groups; every table is rewritten before anything names a block
    flush       decide what is written to the pools before this step's forward pass; retire who is done
    admit       take waiting sequences in policy order, with their prefix hits
    decode      one token for every running sequence; blocks may run out, then the newest is preempted
    prefill     what is left of the token budget, oldest first
    build       turn the decisions into an immutable StepPlan and advance the sequences
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from mlxbatch.request import Priority, Request, TokenLogprob
from mlxbatch.scheduling.admission import Admission, PrefixHit
from mlxbatch.scheduling.budget import PrefillBudget, StepLoad, WholeStep
from mlxbatch.scheduling.builder import StepBuilder
from mlxbatch.scheduling.groups import KVMemory
from mlxbatch.scheduling.plan import StepPlan, StepResult
from mlxbatch.scheduling.policy import (
    INTERACTIVE_STREAK,
    FirstComeFirstServed,
    Policy,
    WaitingQueue,
    service_class,
)
from mlxbatch.scheduling.sequence import Sequence, Status
from mlxbatch.scheduling.slots import SlotPool
from mlxbatch.scheduling.unfinished import UnfinishedRequests

MAX_DEFERRED = 64  # waiting sequences looked past while they wait for a prefix that is being computed
MAX_LOOK_AHEAD = 512  # waiting sequences looked at in one plan


class Sampled(NamedTuple):
    """One token that commit() appended."""

    seq: Sequence
    token_id: int
    logprob: TokenLogprob | None


class Preemption(NamedTuple):
    step: int
    seq: Sequence
    lost_tokens: int
    reason: str


class Scheduler:
    """Owns every sequence, the tail slots and the block pools. Pure bookkeeping: it never waits and never fails
    half way."""

    def __init__(
        self,
        kv: KVMemory,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        tail_len: int,
        eos_token_ids: Iterable[int] = (),
        policy: Policy | None = None,
        prefill_budget: PrefillBudget | None = None,
        seed: int = 0,
    ) -> None:
        self.kv = kv
        self.slots = SlotPool(max_num_seqs)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.tail_len = tail_len
        self.unfinished = UnfinishedRequests(
            kv, max_model_len=max_model_len, eos_token_ids=eos_token_ids, seed=seed
        )
        self.policy = policy or FirstComeFirstServed()
        self.prefill_budget = prefill_budget or WholeStep()
        self.waiting = WaitingQueue(self.policy)
        self.running: list[Sequence] = []  # in policy order: the last is the first to be preempted
        self.admission = Admission(kv)
        self.preemptions: list[Preemption] = []  # since the reader last emptied it
        self.num_preemptions = 0
        self._retiring: list[Sequence] = []  # finished, still holding slot and blocks
        self._pending: set[int] = set()  # sequences whose chunk of the step before is not in the pools yet
        self._flush_due = False  # a row's tail is full: what the next plan has to write
        self._prefilling = False  # a running prompt is not computed to its end
        self._shrink_idle = False
        self._step = 0

    # -- requests ------------------------------------------------------------------------------------------

    @property
    def wait_reason(self) -> str:
        """Why the head of the queue was not admitted by the last plan; empty if nothing waits."""
        return self.admission.wait_reason

    @property
    def has_work(self) -> bool:
        """Whether plan() has something to do, or will have once the step in flight is committed."""
        if self.running or len(self.waiting) or self._retiring or self._pending or len(self.unfinished):
            return True
        return self._shrink_idle or self.kv.bytes_held > self.kv.budget  # memory is to be given back

    @property
    def holders(self) -> list[Sequence]:
        """Sequences that hold a slot and blocks: the running ones, and those that ended since the last plan."""
        return [*self.running, *self._retiring]

    @property
    def num_unfinished(self) -> int:
        return len(self.unfinished)

    @property
    def max_model_len(self) -> int:
        return self.unfinished.max_model_len

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request; returns its `n` sequences. Raises RequestError if it can never fit."""
        sequences = self.unfinished.add(request)
        if self.kv.prefix_caching:
            self.kv.hash_prompt(sequences[0].prompt_hashes, sequences[0].token_ids)
        if request.resume_token_ids:
            for seq in sequences:
                self.waiting.add(seq)
        else:
            sequences[0].siblings = sequences[1:]
            self.waiting.add(sequences[0])
        return sequences

    def check_fits(self, num_prompt: int, max_tokens: int | None) -> None:
        """Raise RequestError, with the arithmetic, if a request of these lengths can never run."""
        self.unfinished.check_fits(num_prompt, max_tokens)

    def cancel(self, request_id: str, now: float) -> list[Sequence]:
        """End what is unfinished of a request; returns those sequences."""
        ended = self.unfinished.of_request(request_id)
        for seq in ended:
            self.finish(seq, "abort", now)
        return ended

    def finish(
        self,
        seq: Sequence,
        reason: str,
        now: float,
        *,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> None:
        """End a sequence. What it holds is given back by the next plan, after a last flush."""
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.WAITING and seq in self.waiting:
            self.waiting.remove(seq)
        if seq.siblings and reason != "abort":  # its prompt was never finished: the others go on alone
            self._release_siblings(seq)
        seq.finish(reason, now, stop_reason=stop_reason, error=error)
        self.unfinished.remove(seq)
        if seq.kv is not None:
            self.running.remove(seq)
            self._retiring.append(seq)

    def set_kv_budget(self, budget: int) -> int:
        """Change the bytes for KV blocks from the next plan on; returns what was granted.

        Never less than the longest unfinished sequence needs now, and a sequence that runs alone raises the budget
        as it grows, so that no request is lost.
        """
        kv, size = self.kv, self.kv.block_size
        kv.limit = max(kv.limit, budget)
        alone = kv.bytes_alone(self.unfinished.longest + size)
        kv.budget = max(budget, min(alone, kv.limit))
        return kv.budget

    def _raise_budget_for(self, num_tokens: int) -> bool:
        """Take back memory that was given away, for a sequence that could not go on even alone."""
        kv = self.kv
        needed = kv.bytes_alone(num_tokens + kv.block_size)
        if kv.budget >= min(needed, kv.limit):
            return False
        kv.budget = min(needed, kv.limit)
        return True

    def shrink_idle(self) -> None:
        """Let the next plan give back every block that no sequence holds, the prefix cache included."""
        self._shrink_idle = True

    # -- plan ----------------------------------------------------------------------------------------------

    @property
    def reads_first(self) -> bool:
        """Whether the step in flight had better be read before the next is planned.

        A flush waits for it anyway. And a step that computes prompts takes long: what was sampled before it should
        be out by then, and the places of those that ended be filled.
        """
        if self._pending or self._flush_due or self._prefilling:
            return True
        if not len(self.waiting) or self.admission.lacking is not None:
            return False
        # Somebody may be admitted: to a free slot, or to one that the next plan takes back.
        return self.slots.num_free > 0 or any(not seq.wants_step for seq in self.running)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to run. Everything it needs is allocated."""
        builder = StepBuilder(self.kv, self._step)
        self._rebalance(builder)
        self._flush(builder)
        self._admit(builder, now)
        self._choose_decodes(builder, now)
        self._choose_chunks(builder, now)
        self._pending = set()
        for seq in [*builder.decodes, *(seq for seq, _ in builder.chunks)]:
            self._fork_if_prompt_ends(builder, seq, now)
        plan, self._pending = builder.build(self.slots.num_slots())
        self._prefilling = len(builder.decodes) < len(self.running) and any(
            seq.num_to_compute > 1 for seq in self.running
        )
        if plan is not None and plan.has_rows:
            self._step += 1
        return plan

    def _rebalance(self, builder: StepBuilder) -> None:
        kv = self.kv
        while kv.bytes_held > kv.budget:
            kv.rebalance([0] * len(kv.pools))
            if kv.bytes_held <= kv.budget or not self.running:
                break
            # The flush would name blocks that the next round may move, so this victim's tail is not kept.
            self._preempt(self.running[-1], builder, "KV memory was taken away", keep_tail=False)
        if self.admission.lacking is not None and (len(kv.pools) > 1):
            kv.rebalance(self.admission.lacking)
        if self._shrink_idle:
            kv.shrink_idle()
        self.admission.lacking, self._shrink_idle = None, False

    def _flush(self, builder: StepBuilder) -> None:
        """Flush all full blocks of all rows whenever one row, or a retiring one, has to: a flush synchronises."""
        leaving = [seq for seq in self.running if not seq.wants_step]  # the last token is in flight
        self._retiring += leaving
        due = bool(self._pending) or any(self._worth_a_flush(seq) for seq in self._retiring)
        due = due or self._flush_due
        if due:
            for seq in [*self.running, *(s for s in self._retiring if s.status is Status.FINISHED)]:
                self._flush_sequence(seq, builder)
            builder.flush_pending = bool(self._pending)
        for seq in self._retiring:
            if seq.status is not Status.FINISHED:
                self.running.remove(seq)
            self._release(seq, builder)
        self._retiring = []

    def _worth_a_flush(self, seq: Sequence) -> bool:
        """Whether a sequence that leaves holds a full block that a later request may hit.

        The next turn of a conversation will hit the answer's blocks; nothing continues the answer of a batch
        request, so only the prompt's blocks matter there.
        """
        if not self.kv.prefix_caching or seq.kv is None:
            return False
        useful = seq.num_computed if seq.interactive else min(seq.num_computed, seq.num_prompt_tokens)
        return useful - seq.kv.flushed >= self.kv.block_size

    def _flush_sequence(self, seq: Sequence, builder: StepBuilder) -> None:
        if seq.kv is None:
            return
        full = min(seq.num_computed, len(seq.token_ids)) // self.kv.block_size * self.kv.block_size
        if full <= seq.kv.flushed:
            return
        if seq.seq_id not in self._pending:
            builder.flush_tail(seq, full)
        self.kv.advance(seq.kv, full, seq.num_computed, seq.token_ids)

    def _release(self, seq: Sequence, builder: StepBuilder) -> None:
        builder.released_slots.append(seq.slot)
        self.slots.release(seq.slot)
        self.kv.close(seq.seq_id)
        seq.slot, seq.kv = -1, None

    # -- admission -----------------------------------------------------------------------------------------

    def _admit(self, builder: StepBuilder, now: float) -> None:
        admission = self.admission
        admission.begin()
        if not len(self.waiting):
            return
        left = dict.fromkeys(Priority, self.max_num_batched_tokens)  # for a request of each class
        for seq in self.running:
            _spend(left, seq)
        deferred = 0
        turn = self.waiting.batch_turn
        for seq in self.waiting.candidates(MAX_LOOK_AHEAD):
            if left[service_class(seq)] <= 0:
                admission.waits("the step's token budget is spent on earlier prompts")
                if seq is turn:
                    continue
                return
            if seq.in_flight:
                continue
            if not self.slots.num_free and not self._preempt_batch_for(seq, builder):
                admission.waits("no free slot")
                if seq is turn:
                    continue  # the next free slot is its; an interactive request may still take a batch row's
                return
            hit = self.kv.find_prefix(seq.prompt_hashes, seq.token_ids)
            if admission.prefix_is_being_computed(seq, hit, self.running):
                deferred += 1
                admission.waits("its prefix is being computed by a running request")
                if deferred >= MAX_DEFERRED:
                    return
                continue
            while not admission.has_room(seq, hit, self.running):
                if not self.running and self._raise_budget_for(len(seq.token_ids)):
                    continue
                if not self._preempt_batch_for(seq, builder):
                    return
                hit = self.kv.find_prefix(seq.prompt_hashes, seq.token_ids)
            self._start(seq, hit, now)
            _spend(left, seq)

    def _start(self, seq: Sequence, hit: PrefixHit, now: float) -> None:
        self.waiting.admit(seq)
        kv = self.kv.open(seq.seq_id)
        cached = self.kv.take_prefix(kv, hit, list(seq.prompt_hashes[: len(hit[0]) if hit else 0]))
        seq.start(self.slots.allocate(), kv, cached, now)
        self._insert_running(seq)

    def _insert_running(self, seq: Sequence) -> None:
        bisect.insort(self.running, seq, key=self.policy.key)

    # -- preemption ----------------------------------------------------------------------------------------

    def _preempt_batch_for(self, seq: Sequence, builder: StepBuilder) -> bool:
        """Make room for an interactive sequence: the newest batch row goes. False if there is none."""
        if service_class(seq) is not Priority.INTERACTIVE:
            return False
        victim = next((s for s in reversed(self.running) if service_class(s) is Priority.BATCH), None)
        if victim is None:
            return False
        self._preempt(victim, builder, "an interactive request needs its place")
        return True

    def _preempt(self, seq: Sequence, builder: StepBuilder, reason: str, *, keep_tail: bool = True) -> None:
        """Take slot and blocks away. Full blocks are flushed first, so that recomputation usually hits them."""
        if keep_tail and self.kv.prefix_caching:
            self._flush_sequence(seq, builder)
        self.preemptions.append(Preemption(self._step, seq, seq.num_computed, reason))
        self.num_preemptions += 1
        builder.drop(seq)
        self.running.remove(seq)
        self._release(seq, builder)
        seq.preempt()
        if self.kv.prefix_caching:
            self.kv.hash_prompt(seq.prompt_hashes, seq.token_ids)
        self.waiting.add(seq)

    def _allocate(self, seq: Sequence, end: int, builder: StepBuilder, *, flush_follows: bool) -> bool:
        """Blocks for positions up to `end`, preempting from the end of the running list. False if `seq` itself
        had to go, or must wait.

        When the next plan is certain to flush the sequence, what has left its window by then makes room first.
        """
        kv = seq.memory
        if flush_follows:
            self.kv.leave_behind(kv, end)
        while not self.kv.allocate(kv, end):
            self.admission.lacking = self.kv.block_needs(kv, end)
            needs = ", ".join(str(n) for n in self.admission.lacking)
            victim = self.running[-1]
            if self.running[0] is seq and victim is seq:
                if self._raise_budget_for(end):
                    continue
                # Another group holds the memory. Alone, it gets all it may ever need, or it would be back in a block.
                self.admission.lacking = self.kv.blocks_for(seq.max_length)
            self._preempt(victim, builder, f"out of KV blocks: {needs} needed")
            if victim is seq:
                return False
        return True

    # -- rows ----------------------------------------------------------------------------------------------

    def _choose_decodes(self, builder: StepBuilder, now: float) -> None:
        """Once for every row of every step, so it calls as little as it can."""
        size, tail_len, chosen = self.kv.block_size, self.tail_len, builder.decodes
        self._flush_due = False
        for seq in list(self.running):
            kv, end = seq.kv, seq.num_computed + 1
            if end != len(seq.token_ids) + seq.in_flight or kv is None:
                continue  # a prompt, or preempted by an older row
            full = end - kv.flushed >= tail_len
            if full:
                self._flush_due = True
            if end % size or self._allocate(seq, end, builder, flush_follows=full):
                chosen.append(seq)

    def _choose_chunks(self, builder: StepBuilder, now: float) -> None:
        prompts: list[Sequence] = []
        if len(builder.decodes) < len(self.running):
            prompts = [seq for seq in self.running if not seq.is_decoding]
        available = self.max_num_batched_tokens - len(builder.decodes)
        grant = self.prefill_budget.grant(StepLoad(builder.decodes, prompts, available, now))
        builder.off_target = grant.off_target
        left = min(grant.num_tokens, available)
        # Interactive prompts go first, but leave a block to the others: chats that never cease must not stop them.
        kept = self.kv.block_size if any(service_class(seq) is Priority.BATCH for seq in prompts) else 0
        if left <= kept and self._step % INTERACTIVE_STREAK:
            kept = 0  # too small to be shared: it goes to one class or the other
        for seq in prompts:
            if left <= 0:
                return
            if seq.status is not Status.RUNNING:
                continue  # preempted by an older prompt
            size = min(seq.num_to_compute, left if service_class(seq) is Priority.BATCH else left - kept)
            if size <= 0:
                continue
            end = seq.num_computed + size
            completes = end - seq.memory.flushed >= self.kv.block_size
            if self._allocate(seq, end, builder, flush_follows=completes):
                builder.chunks.append((seq, size))
                left -= size

    def _fork_if_prompt_ends(self, builder: StepBuilder, seq: Sequence, now: float) -> None:
        """Start the other answers of a request in the step that samples the first token of each."""
        if not seq.siblings or not builder.samples(seq):
            return
        end = seq.num_computed + builder.size_of(seq)
        for child in list(seq.siblings):
            if not self.slots.num_free:
                break
            seq.siblings.remove(child)
            child.start(self.slots.allocate(), self.kv.fork(seq.seq_id, child.seq_id), end, now)
            child.num_cached = end
            self._insert_running(child)
            builder.forks.append((seq, child))
        self._release_siblings(seq)

    def _release_siblings(self, seq: Sequence) -> None:
        """Those that found no slot prefill on their own; the prefix cache usually spares them the prompt."""
        for child in seq.siblings:
            child.prompt_hashes = list(seq.prompt_hashes)
            self.waiting.add(child)
        seq.siblings = []

    # -- commit --------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Sampled]:
        """Apply what a step sampled. Rows of sequences that ended meanwhile are ignored."""
        sampled = []
        find = self.unfinished.get
        for row, token_id, finite, logprob in zip(
            plan.samples, result.token_ids, result.finite, result.logprobs, strict=True
        ):
            seq = find(row.seq_id)
            if seq is None:
                continue
            if not finite:
                seq.in_flight -= 1
                self.finish(seq, "error", now, error="the model's logits overflowed (no finite value)")
                sampled.append(Sampled(seq, -1, None))
                continue
            seq.append(token_id, now)
            ended = seq.stop_for(token_id)
            if ended is not None:
                self.finish(seq, ended[0], now, stop_reason=ended[1])
            sampled.append(Sampled(seq, token_id, logprob))
        return sampled

    def check(self) -> None:
        """Raise AssertionError unless slots, blocks and queues agree."""
        self.kv.check()
        slots = [s.slot for s in self.holders]
        if len(set(slots)) != len(slots) or len(slots) != self.slots.num_used:
            raise AssertionError("every slot in use belongs to exactly one sequence")
        keys = [self.policy.key(s) for s in self.running]
        if keys != sorted(keys):
            raise AssertionError("running sequences are out of policy order")
        for seq in self.running:
            if seq.status is not Status.RUNNING or seq.kv is None:
                raise AssertionError("a running sequence holds no memory")
            if not seq.kv.flushed <= seq.num_computed <= seq.num_tokens <= seq.max_length:
                raise AssertionError(f"lengths of sequence {seq.seq_id} are out of order")
            if seq.seq_id in self._pending:
                continue
            if seq.num_computed - seq.kv.flushed > self.tail_len:
                raise AssertionError(f"sequence {seq.seq_id} has overrun its tail")
            if seq.num_computed - seq.kv.flushed < self.tail_len and not seq.kv.view_holds:
                raise AssertionError(f"sequence {seq.seq_id} goes on reading blocks that it has given back")


def _spend(left: dict[Priority, int], seq: Sequence) -> None:
    """Take a running sequence's tokens off what a step has left for each class. The prompts of batch requests take
    nothing from interactive ones, which are computed before them."""
    left[Priority.BATCH] -= seq.num_to_compute
    if seq.is_decoding or service_class(seq) is Priority.INTERACTIVE:
        left[Priority.INTERACTIVE] -= seq.num_to_compute
