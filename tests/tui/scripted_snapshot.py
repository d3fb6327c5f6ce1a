"""What a scripted engine shows of itself: the same Snapshot that the real one takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mlxbatch.engine.snapshot import (
    BLOCK_CACHED,
    BLOCK_EVICTED,
    BLOCK_FREE,
    BLOCK_RESERVED,
    BLOCK_SHARED,
    Counters,
    EffCurve,
    EffPoint,
    MachineFacts,
    MemoryUse,
    ModelFacts,
    Percentiles,
    PoolState,
    Rates,
    SlotState,
    Snapshot,
    TailState,
    WaitingRequest,
)

if TYPE_CHECKING:
    from scripted_engine import ScriptedEngine, Sequence_

START = 1_764_420_060.0  # 2025-11-29 12:41:00 UTC
BLOCK = 16


def snapshot_of(engine: ScriptedEngine) -> Snapshot:
    """Everything that the engine shows of itself now."""
    second = int(engine.clock)
    history = [engine.per_second.get(second - age, [0, 0]) for age in range(60, 0, -1)]
    now = [engine.per_second.get(second - age, [0, 0]) for age in (1, 2)]
    decode, prefill = (sum(entry[part] for entry in now) / 2 for part in (0, 1))
    return Snapshot(
        number=engine.number,
        clock=engine.clock,
        wall=START + engine.clock,
        uptime=engine.clock,
        model=ModelFacts(
            name=engine.model,
            dtype="float16",
            quantization="4-bit g64",
            layers=36,
            max_model_len=engine.max_model_len,
            weight_bytes=2_260_000_000,
            kv_bytes_per_token=147_456,
            kv_dtype="float16",
            block_size=BLOCK,
            attention="metal",
        ),
        machine=MachineFacts(
            chip="M3 Pro",
            backend="metal",
            memory_bytes=18 * 2**30,
            budget_bytes=12 * 10**9,
            bandwidth=150e9,
        ),
        memory=MemoryUse(weights=2_260_000_000, pool=engine.total_blocks * BLOCK * 147_456),
        max_num_seqs=engine.max_slots,
        max_num_batched_tokens=engine.budget,
        slots=tuple(_slot(engine, sequence) for sequence in sorted(engine.running, key=lambda s: s.slot)),
        waiting=tuple(_waiting(engine, sequence) for sequence in engine.queue[:32]),
        waiting_count=len(engine.queue),
        head_reason=_head_reason(engine),
        pools=(_pool(engine),),
        tails=TailState(
            slots=max(1, len(engine.running)),
            tail_len=2 * BLOCK,
            tokens=sum(sequence.computed - len(sequence.blocks) * BLOCK for sequence in engine.running),
        ),
        steps=tuple(engine.marks[-240:]),
        rates=Rates(
            decode=decode,
            prefill=prefill,
            decode_history=tuple(float(entry[0]) for entry in history),
            prefill_history=tuple(float(entry[1]) for entry in history),
        ),
        queue_time=_percentiles(engine.samples["queue"]),
        ttft=_percentiles(engine.samples["ttft"]),
        tpot=_percentiles(engine.samples["tpot"]),
        preemptions_last_minute=engine.totals.get("preemptions", 0),
        counters=Counters(
            steps=len(engine.marks),
            **{name: value for name, value in engine.totals.items() if name in Counters.__struct_fields__},
        ),
        eff=_curve(engine),
        events=tuple(engine.events_log[-64:]),
        clients=tuple(engine.clients),
    )


def _slot(engine: ScriptedEngine, sequence: Sequence_) -> SlotState:
    times = sequence.last_times
    speed = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None
    ttft = sequence.first_token - sequence.arrival if sequence.first_token is not None else None
    return SlotState(
        slot=sequence.slot,
        request_id=sequence.key,
        label=sequence.label,
        client=sequence.client,
        priority=sequence.priority,
        phase=sequence.phase,
        prompt_tokens=sequence.prompt_tokens,
        computed_tokens=sequence.computed,
        target_tokens=sequence.target,
        output_tokens=sequence.output,
        max_tokens=sequence.max_tokens,
        blocks=len(sequence.blocks),
        shared_blocks=sum(len(engine.owners[block]) > 1 for block in sequence.blocks),
        cached_tokens=sequence.cached,
        tail_tokens=sequence.computed - len(sequence.blocks) * BLOCK,
        tokens_per_second=speed,
        ttft=ttft,
        preemptions=sequence.preemptions,
    )


def _waiting(engine: ScriptedEngine, sequence: Sequence_) -> WaitingRequest:
    return WaitingRequest(
        request_id=sequence.key,
        label=sequence.label,
        client=sequence.client,
        priority=sequence.priority,
        prompt_tokens=sequence.prompt_tokens,
        hit_tokens=len(engine.prefix_blocks(sequence)) * BLOCK,
        waited=engine.clock - sequence.arrival,
        preempted=sequence.preemptions > 0,
    )


def _head_reason(engine: ScriptedEngine) -> str:
    if not engine.queue:
        return ""
    if len(engine.running) >= engine.max_slots:
        return "no free slot"
    missing = engine.lacking(engine.queue[0])
    return f"{missing} blocks missing" if missing else ""


def _pool(engine: ScriptedEngine) -> PoolState:
    slot_of = {sequence.key: sequence.slot for sequence in engine.running}
    codes = [BLOCK_RESERVED]
    for block in range(1, engine.total_blocks):
        owners = engine.owners[block]
        if len(owners) > 1:
            codes.append(BLOCK_SHARED)
        elif owners:
            codes.append(slot_of[next(iter(owners))])
        elif block in engine.cached:
            codes.append(BLOCK_CACHED)
        elif engine.clock - engine.evicted_at.get(block, -9.0) < 1.0:
            codes.append(BLOCK_EVICTED)
        else:
            codes.append(BLOCK_FREE)
    return PoolState(
        bytes_per_block=BLOCK * 147_456,
        total_blocks=engine.total_blocks,
        allocated_blocks=engine.total_blocks,
        in_use=sum(bool(owners) for owners in engine.owners),
        shared=sum(code == BLOCK_SHARED for code in codes),
        cached=len(engine.cached),
        free=engine.free(),
        runs=tuple(_run_lengths(codes)),
    )


def _curve(engine: ScriptedEngine) -> EffCurve:
    points = [
        (1, 62, 1.0, 0.95),
        (2, 102, 0.82, 0.94),
        (4, 158, 0.64, 0.88),
        (8, 240, 0.48, 0.81),
        (16, 310, 0.31, 0.75),
    ]
    rows = [mark.decode_rows for mark in engine.marks[-40:] if mark.decode_rows]
    now = None
    if rows and engine.running:
        mean = round(sum(rows) / len(rows))
        efficiency = 6.4 * (1 - 2.718281828 ** (-mean / 6.4)) / mean / 0.925
        now = EffPoint(mean, 62 * mean * efficiency, min(1.0, efficiency), 0.95 - 0.015 * mean)
    return EffCurve(
        source="tuned",
        saturation=6.4,
        cap=engine.max_slots,
        points=tuple(EffPoint(*p) for p in points),
        now=now,
    )


def _percentiles(values: list[float]) -> Percentiles:
    if not values:
        return Percentiles()
    ranked = sorted(values)
    p50, p95, p99 = (ranked[min(len(ranked) - 1, int(share * len(ranked)))] for share in (0.5, 0.95, 0.99))
    return Percentiles(p50, p95, p99, len(ranked))


def _run_lengths(codes: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for code in codes:
        if runs and runs[-1][0] == code:
            runs[-1] = (code, runs[-1][1] + 1)
        else:
            runs.append((code, 1))
    return runs
