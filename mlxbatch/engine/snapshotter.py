"""Takes a Snapshot of an engine between two steps: the real slots, blocks and counters, never estimates."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from mlxbatch.engine.core import EngineCore
from mlxbatch.engine.snapshot import (
    BLOCK_CACHED,
    BLOCK_EVICTED,
    BLOCK_FREE,
    BLOCK_RESERVED,
    BLOCK_SHARED,
    WAITING_SHOWN,
    EffCurve,
    EffPoint,
    MachineFacts,
    MemoryUse,
    ModelFacts,
    Phase,
    PoolState,
    SlotState,
    Snapshot,
    TailState,
    WaitingRequest,
)
from mlxbatch.scheduling.sequence import Sequence

RATE_SECONDS = 5.0  # over which a slot's tokens per second are taken
EVICTED_SECONDS = 1.0  # how long an evicted block is shown as such
NOW_STEPS = 64  # steps behind the operating point


class Snapshotter:
    """Keeps what a rate needs between snapshots: when each sequence had how many tokens."""

    def __init__(
        self,
        core: EngineCore,
        model: ModelFacts,
        machine: MachineFacts,
        memory: Callable[[], MemoryUse],
        curve: Callable[[], EffCurve] = EffCurve,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._core = core
        self._model = model
        self._machine = machine
        self._memory = memory
        self._curve = curve
        self._wall = wall
        self._number = 0
        self._marks: dict[int, list[tuple[float, int]]] = {}
        self._was_cached: list[frozenset[int]] = []
        self._evicted: list[dict[int, float]] = []

    def take(self) -> Snapshot:
        core, scheduler = self._core, self._core.scheduler
        now = core.clock()
        self._number += 1
        pools = tuple(self._pool(group, now) for group in range(len(scheduler.kv.pools)))
        use = core.kv_use()
        latencies = core.metrics.latencies()
        evictions = sum(pool.evictions for pool in scheduler.kv.pools)
        waiting = list(itertools.islice(scheduler.waiting, WAITING_SHOWN))
        return Snapshot(
            number=self._number,
            clock=now,
            wall=self._wall(),
            uptime=now - core.metrics.started,
            model=self._model,
            machine=self._machine,
            memory=self._memory(),
            max_num_seqs=scheduler.slots.max_slots,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            slots=self._slots(now),
            waiting=tuple(self._waiting(seq, now) for seq in waiting),
            waiting_count=len(scheduler.waiting),
            head_reason=scheduler.wait_reason if waiting else "",
            pools=pools,
            tails=TailState(slots=scheduler.slots.num_used, tail_len=scheduler.tail_len, tokens=use.tail_tokens),
            steps=tuple(core.metrics.tape),
            rates=core.metrics.rates(now),
            queue_time=latencies["queue_time"],
            ttft=latencies["ttft"],
            tpot=latencies["tpot"],
            preemptions_last_minute=core.metrics.preemptions_since(now - 60),
            counters=core.metrics.counters(preemptions=scheduler.num_preemptions, evictions=evictions),
            eff=self._eff(),
            events=tuple(core.events),
        )

    def _slots(self, now: float) -> tuple[SlotState, ...]:
        running = sorted(self._core.scheduler.running, key=lambda seq: seq.slot)
        alive = {seq.seq_id for seq in running}
        self._marks = {seq_id: marks for seq_id, marks in self._marks.items() if seq_id in alive}
        return tuple(self._slot(seq, now) for seq in running)

    def _slot(self, seq: Sequence, now: float) -> SlotState:
        kv = self._core.scheduler.kv
        held = shared = flushed = 0
        if seq.kv is not None:
            flushed = seq.kv.flushed
            for pool, table in zip(kv.pools, seq.kv.tables, strict=True):
                ids = [block_id for block_id in table.ids if block_id is not None]
                held += len(ids)
                shared += sum(1 for block_id in ids if pool.refs(block_id) > 1)
        phase: Phase = "decode" if seq.is_decoding else "recompute" if seq.num_preemptions else "prefill"
        request = seq.request
        return SlotState(
            slot=seq.slot,
            request_id=request.request_id,
            output_index=seq.index,
            priority=int(request.priority),
            phase=phase,
            prompt_tokens=seq.num_prompt_tokens,
            computed_tokens=seq.num_computed,
            target_tokens=seq.num_tokens,
            output_tokens=seq.num_output_tokens,
            max_tokens=seq.max_length - seq.num_prompt_tokens,
            blocks=held,
            shared_blocks=shared,
            cached_tokens=seq.num_cached,
            tail_tokens=max(0, seq.num_computed - flushed),
            tokens_per_second=self._rate(seq, now),
            ttft=None if seq.first_token is None else seq.first_token - request.arrival,
            preemptions=seq.num_preemptions,
        )

    def _rate(self, seq: Sequence, now: float) -> float | None:
        marks = self._marks.setdefault(seq.seq_id, [])
        marks.append((now, seq.num_output_tokens))
        while len(marks) > 2 and marks[1][0] <= now - RATE_SECONDS:
            marks.pop(0)
        (then, before), (_, count) = marks[0], marks[-1]
        if before == 0 and seq.first_token is not None and count > 1:
            then, before = seq.first_token, 1
        return (count - before) / (now - then) if now > then and count > before else None

    def _waiting(self, seq: Sequence, now: float) -> WaitingRequest:
        scheduler = self._core.scheduler
        hit = scheduler.kv.find_prefix(seq.prompt_hashes, seq.token_ids)
        return WaitingRequest(
            request_id=seq.request.request_id,
            priority=int(seq.request.priority),
            prompt_tokens=len(seq.token_ids),
            hit_tokens=(len(hit[0]) if hit else 0) * scheduler.kv.block_size,
            waited=now - seq.request.arrival,
            preempted=seq.num_preemptions > 0,
        )

    def _pool(self, group: int, now: float) -> PoolState:
        scheduler = self._core.scheduler
        kv, spec, pool = scheduler.kv, scheduler.kv.specs[group], scheduler.kv.pools[group]
        owner: dict[int, int] = {}
        shared = 0
        for seq in scheduler.holders:
            if seq.kv is None:
                continue
            for block_id in seq.kv.tables[group].ids:
                if block_id is None:
                    continue
                if pool.refs(block_id) > 1:
                    shared += owner.get(block_id) != BLOCK_SHARED
                    owner[block_id] = BLOCK_SHARED
                else:
                    owner[block_id] = seq.slot
        total = max(pool.num_blocks, kv.max_blocks(group) + 1)
        evicted = self._evicted_of(group, now)

        def state(block_id: int) -> int:
            if block_id == 0:
                return BLOCK_RESERVED
            if block_id >= pool.num_blocks:
                return BLOCK_FREE
            if block_id in owner:
                return owner[block_id]
            if pool.is_cached(block_id):
                return BLOCK_CACHED
            return BLOCK_EVICTED if block_id in evicted else BLOCK_FREE

        runs = [(key, len(list(same))) for key, same in itertools.groupby(map(state, range(pool.num_blocks)))]
        if total > pool.num_blocks:
            if runs and runs[-1][0] == BLOCK_FREE:
                runs[-1] = (BLOCK_FREE, runs[-1][1] + total - pool.num_blocks)
            else:
                runs.append((BLOCK_FREE, total - pool.num_blocks))
        return PoolState(
            name=spec.name,
            window=spec.window,
            bytes_per_block=spec.bytes_per_block,
            total_blocks=total,
            allocated_blocks=pool.num_blocks,
            in_use=pool.num_used,
            shared=shared,
            cached=pool.num_cached,
            free=total - 1 - pool.num_used - pool.num_cached,
            runs=tuple(runs),
        )

    def _evicted_of(self, group: int, now: float) -> dict[int, float]:
        """Blocks that were findable at the snapshot before and are not any more, for a second."""
        pool = self._core.scheduler.kv.pools[group]
        while len(self._was_cached) <= group:
            self._was_cached.append(frozenset())
            self._evicted.append({})
        findable = pool.index.block_ids()
        evicted = {b: t for b, t in self._evicted[group].items() if now - t < EVICTED_SECONDS}
        evicted.update(dict.fromkeys(self._was_cached[group] - findable, now))
        self._was_cached[group], self._evicted[group] = findable, evicted
        return evicted

    def _eff(self) -> EffCurve:
        import msgspec

        curve = self._curve()
        recent = [mark for mark in self._core.metrics.tape if mark.decode_rows][-NOW_STEPS:]
        seconds = sum(mark.seconds for mark in recent)
        if not recent or seconds <= 0:
            return msgspec.structs.replace(curve, cap=self._core.scheduler.slots.max_slots)
        tokens = sum(mark.decode_rows for mark in recent)
        rows = round(tokens / len(recent))
        rate = tokens / seconds
        one = next((p.tokens_per_second for p in curve.points if p.rows == 1), 0.0)
        now = EffPoint(rows, rate, rate / (one * rows) if one and rows else 0.0)
        return msgspec.structs.replace(curve, cap=self._core.scheduler.slots.max_slots, now=now)
