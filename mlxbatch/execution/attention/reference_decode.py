"""The reference's decode rows: products with pool blocks where they lie, and with gathered tails.

The queries of the query heads that share a KV head, q_len of each, are the rows of one matrix:

    M = Hq / Hk * q_len queries x [D]  times  a block's keys [D, B]  ->  scores [M, B]

Every MLX operation costs a CPU some microseconds whatever it does, so shapes stay [R, Hk, M, ...] throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxbatch.execution.attention.layout import AttentionSpec, DecodeLayout
from mlxbatch.execution.attention.reference_rows import Index, LengthClass, pool_mask, row_plan, tail_places
from mlxbatch.execution.attention.reference_scores import capped, masked, weights_of


@dataclass(frozen=True, slots=True, eq=False)
class KeyPart:
    """One part of the keys: queries [R, Hk, M, D] (scaled, float32) against pool [N, Hk, B, D] and tail."""

    queries: mx.array
    pool: mx.array
    tail: mx.array


def key_part(queries: mx.array, scale: float, pool: mx.array, tail: mx.array) -> KeyPart:
    """queries [R, Hq, q_len, D] of any type."""
    rows, _, _, dim = queries.shape
    grouped = queries.reshape(rows, pool.shape[1], -1, dim)
    return KeyPart((grouped * scale if scale != 1.0 else grouped).astype(mx.float32), pool, tail)


def decode_rows(
    parts: list[KeyPart],
    pool_v: mx.array,
    tail_v: mx.array,
    layout: DecodeLayout,
    spec: AttentionSpec,
    q_len: int,
    sinks: mx.array | None,
) -> mx.array:
    """float32 [R, Hk, M, Dv]. The scores of several key parts are added; a sink for each query head."""
    kv_heads, block_size = pool_v.shape[1], pool_v.shape[2]
    group = parts[0].queries.shape[2] // q_len
    if sinks is not None:
        sinks = mx.repeat(sinks.reshape(1, kv_heads, group, 1), q_len, axis=2)
    index, tail_mask = tail_places(layout, kv_heads, tail_v.shape[2], spec.window, q_len, group)
    tail_scores = _sum([part.queries @ _tail_rows(part.tail, index).swapaxes(-1, -2) for part in parts])
    tail_scores = masked(capped(tail_scores, spec), tail_mask)
    tail_values = _tail_rows(tail_v, index)
    plan = row_plan(layout, kv_heads, block_size)
    outs = []
    for own in plan.classes:
        own_scores, own_values = tail_scores, tail_values
        if own.rows is not None:
            own_scores, own_values = tail_scores[own.rows], tail_values[own.rows]
        if own.num_blocks == 0:
            outs.append(weights_of(own_scores, sinks) @ own_values)
            continue
        mask, readable = pool_mask(own, layout, spec.window, q_len, group)
        scores = masked(capped(_sum([_pool_scores(part, own) for part in parts]), spec), mask)
        weights = weights_of(mx.concatenate([scores, own_scores], axis=-1), sinks)
        pooled, newest = mx.split(weights, [scores.shape[-1]], axis=-1)
        outs.append(_pool_values(pooled, pool_v, own, readable) + newest @ own_values)
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs)
    return out if plan.restore is None else out[plan.restore]


def _sum(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _tail_rows(tail: mx.array, index: Index) -> mx.array:
    """Tail [S, Hk, L, D] at `index` -> float32 [R, Hk, U, D]."""
    return tail[index].astype(mx.float32)


def _pool_scores(part: KeyPart, own: LengthClass) -> mx.array:
    """Queries times the keys of the class's blocks -> [Rc, Hk, M, blocks * B]."""
    if part.pool.dtype == mx.float32:
        scores = mx.gather_mm(part.queries, part.pool.swapaxes(-1, -2), own.query_index, own.block_index)
    else:
        queries = part.queries if own.rows is None else part.queries[own.rows]
        blocks = part.pool[own.tables].astype(mx.float32)  # [Rc, blocks, Hk, B, D]
        scores = queries[:, :, None] @ blocks.transpose(0, 2, 1, 4, 3)
    # [Rc, Hk, blocks, M, B]: one query's scores side by side
    return scores.swapaxes(2, 3).flatten(3)


def _pool_values(weights: mx.array, pool: mx.array, own: LengthClass, readable: mx.array | None) -> mx.array:
    """Weights [Rc, Hk, M, blocks * B] times the values of the class's blocks -> [Rc, Hk, M, Dv]."""
    by_block = mx.unflatten(weights, 3, (own.num_blocks, -1)).swapaxes(2, 3)
    if pool.dtype == mx.float32 and readable is None:
        return mx.gather_mm(by_block, pool, own.weight_index, own.block_index).sum(axis=2)
    blocks = pool[own.tables].astype(mx.float32)  # [Rc, blocks, Hk, B, Dv]
    if readable is not None:
        blocks = mx.where(readable, blocks, 0.0)
    return (by_block @ blocks.swapaxes(1, 2)).sum(axis=2)
