"""Paged attention in plain MLX operations: runs anywhere, and is what the kernels are checked against.

Nothing outside the valid positions reaches a result, whatever it holds: invalid keys are masked, and in
place of invalid values a valid one of the same row is read (its weight is zero, but 0 x NaN is NaN).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxbatch.execution.attention.layout import AttentionSpec, ChunkLayout, DecodeLayout, LayerKV
from mlxbatch.execution.attention.reference_rows import LengthClass, pool_mask, row_plan, tail_places

# Bytes of scores that a tile of a chunk's queries may have. On a CPU they should stay in its cache (measured: half
# the time of untiled 512 queries at 1,500 positions); on a GPU MLX's fused kernel keeps none.
_CPU_SCORE_BYTES, _GPU_SCORE_BYTES = 2 << 20, 256 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Keys:
    """One part of the keys: queries [R, Hq, q_len, D] (scaled, float32) against pool [N, Hk, B, D] and tail."""

    queries: mx.array
    pool: mx.array
    tail: mx.array


class ReferenceAttention:
    """Implements `PagedAttention`."""

    def __init__(self, score_bytes: int | None = None) -> None:
        """`score_bytes` overrides how large a tile's scores may be."""
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        self._score_bytes = score_bytes or (_CPU_SCORE_BYTES if on_cpu else _GPU_SCORE_BYTES)

    def decode(
        self,
        q: mx.array,
        kv: LayerKV,
        layout: DecodeLayout,
        spec: AttentionSpec,
        sinks: mx.array | None = None,
    ) -> mx.array:
        keys = [_Keys((q * spec.scale).astype(mx.float32), kv.pool_k, kv.tail_k)]
        return _decode(keys, kv.pool_v, kv.tail_v, layout, spec, sinks).astype(q.dtype)

    def prefill(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        kv: LayerKV,
        layout: ChunkLayout,
        spec: AttentionSpec,
        sinks: mx.array | None = None,
    ) -> mx.array:
        keys = chunk_context(kv.pool_k, kv.tail_k, k, layout, spec)
        values = chunk_context(kv.pool_v, kv.tail_v, v, layout, spec)
        if spec.softcap is None:
            keys, values = keys.astype(q.dtype), values.astype(q.dtype)

        def attend(own: slice, seen: slice) -> mx.array:
            part, own_keys, own_values = q[:, :, own], keys[:, :, seen], values[:, :, seen]
            length, width = part.shape[2], own_keys.shape[2]
            mask = _chunk_mask(layout, length, width, spec)
            if spec.softcap is None:
                return mx.fast.scaled_dot_product_attention(
                    part, own_keys, own_values, scale=spec.scale, mask=mask, sinks=sinks
                )
            queries = (part * spec.scale).astype(mx.float32)
            scores = _grouped_matmul(queries, own_keys.astype(mx.float32).swapaxes(-1, -2))
            scores = _masked(scores, _mask_array(mask, length, width), spec)
            return _grouped_matmul(_weights(scores, sinks), own_values.astype(mx.float32)).astype(q.dtype)

        return _by_query_tiles(attend, q, keys.shape[2], spec, self._score_bytes)

    def decode_latent(
        self,
        q_latent: mx.array,
        q_rope: mx.array,
        kv: LayerKV,
        layout: DecodeLayout,
        spec: AttentionSpec,
    ) -> mx.array:
        keys = [
            _Keys((q_latent * spec.scale).astype(mx.float32), kv.pool_k, kv.tail_k),
            _Keys(q_rope.astype(mx.float32), kv.pool_v, kv.tail_v),
        ]
        return _decode(keys, kv.pool_k, kv.tail_k, layout, spec, None).astype(q_latent.dtype)

    def prefill_latent(
        self,
        q_latent: mx.array,
        q_rope: mx.array,
        latent: mx.array,
        rope: mx.array,
        kv: LayerKV,
        layout: ChunkLayout,
        spec: AttentionSpec,
    ) -> mx.array:
        latents = chunk_context(kv.pool_k, kv.tail_k, latent, layout, spec).astype(mx.float32)
        ropes = chunk_context(kv.pool_v, kv.tail_v, rope, layout, spec).astype(mx.float32)

        def attend(own: slice, seen: slice) -> mx.array:
            part, own_latents = q_latent[:, :, own], latents[:, :, seen]
            length, width = part.shape[2], own_latents.shape[2]
            queries = (part * spec.scale).astype(mx.float32)
            scores = _grouped_matmul(queries, own_latents.swapaxes(-1, -2))
            scores += _grouped_matmul(
                q_rope[:, :, own].astype(mx.float32), ropes[:, :, seen].swapaxes(-1, -2)
            )
            mask = _chunk_mask(layout, length, width, spec)
            scores = _masked(scores, _mask_array(mask, length, width), spec)
            return _grouped_matmul(_weights(scores, None), own_latents).astype(part.dtype)

        return _by_query_tiles(attend, q_latent, latents.shape[2], spec, self._score_bytes)


def _by_query_tiles(
    attend: Callable[[slice, slice], mx.array], q: mx.array, width: int, spec: AttentionSpec, score_bytes: int
) -> mx.array:
    """`attend(queries, keys)` over tiles of a chunk's queries q [1, Hq, n, D], which are the last of `width`
    positions: without a fused kernel, MLX would hold the scores of all of them at once."""
    heads, length = q.shape[1:3]
    tile = max(1, score_bytes // (4 * heads * width))
    if tile >= length:
        return attend(slice(None), slice(None))
    parts = []
    for begin in range(0, length, tile):
        end = min(begin + tile, length)
        low = 0 if spec.window is None else max(0, width - length + begin - spec.window + 1)
        parts.append(attend(slice(begin, end), slice(low, width - length + end)))
    return mx.concatenate(parts, axis=2)


def _masked(scores: mx.array, mask: mx.array | None, spec: AttentionSpec) -> mx.array:
    if spec.softcap is not None:
        scores = mx.tanh(scores / spec.softcap) * spec.softcap
    return scores if mask is None else mx.where(mask, scores, -mx.inf)


def _weights(scores: mx.array, sinks: mx.array | None) -> mx.array:
    """Softmax of scores [R, Hq, n, K]. A sink, one for each query head, takes its share and gives no value."""
    if sinks is None:
        return mx.softmax(scores, axis=-1)
    rows, heads, queries, width = scores.shape
    column = mx.broadcast_to(sinks.astype(mx.float32)[None, :, None, None], (rows, heads, queries, 1))
    return mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1)[..., :width]


def _grouped_matmul(a: mx.array, b: mx.array) -> mx.array:
    """a [R, Hq, n, X] times b [R, Hk, X, Y], whose heads serve Hq / Hk heads of `a` each -> [R, Hq, n, Y]."""
    rows, heads, queries, inner = a.shape
    kv_heads = b.shape[1]
    if kv_heads == heads:
        return a @ b
    out = a.reshape(rows, kv_heads, heads // kv_heads, queries, inner) @ b[:, :, None]
    return out.reshape(rows, heads, queries, -1)


def _decode(
    keys: list[_Keys],
    pool_v: mx.array,
    tail_v: mx.array,
    layout: DecodeLayout,
    spec: AttentionSpec,
    sinks: mx.array | None,
) -> mx.array:
    """float32 [R, Hq, q_len, Dv].

    Every product has one row for each query, not one for each query of a group of heads: BLAS libraries run
    a vector times a small matrix at once on the calling thread, but wake all their threads for two rows
    (MKL on 2 cores: 0.4 us against 5 us).
    """
    kv_heads, block_size = pool_v.shape[1], pool_v.shape[2]
    heads, q_len = keys[0].queries.shape[1:3]
    index, tail_mask = tail_places(layout, kv_heads, tail_v.shape[2], spec.window, q_len)
    tail_scores = _sum(
        [_grouped_matmul(part.queries, _tail_rows(part.tail, index).swapaxes(-1, -2)) for part in keys]
    )
    tail_scores = _masked(tail_scores, tail_mask, spec)
    tail_values = _tail_rows(tail_v, index)
    plan = row_plan(layout, heads, kv_heads, block_size)
    outs = []
    for rows in plan.classes:
        own_scores, own_values = tail_scores, tail_values
        if rows.rows is not None:
            own_scores, own_values = tail_scores[rows.rows], tail_values[rows.rows]
        if rows.num_blocks == 0:
            outs.append(_grouped_matmul(_weights(own_scores, sinks), own_values))
            continue
        mask, readable = pool_mask(rows, layout, spec.window, q_len)
        scores = _masked(_sum([_pool_scores(part, rows) for part in keys]), mask, spec)
        width = scores.shape[-1]
        weights = _weights(mx.concatenate([scores, own_scores], axis=-1), sinks)
        pooled = _pool_values(weights[..., :width], pool_v, rows, readable)
        outs.append(pooled + _grouped_matmul(weights[..., width:], own_values))
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs)
    return out if plan.restore is None else out[plan.restore]


def _sum(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _tail_rows(tail: mx.array, index: mx.array) -> mx.array:
    """Tail [S, Hk, L, D] at `index` [R, Hk, U] -> float32 [R, Hk, U, D]."""
    return tail.reshape(-1, tail.shape[3])[index].astype(mx.float32)


def _pool_scores(part: _Keys, rows: LengthClass) -> mx.array:
    """Queries times the keys of the class's blocks -> [Rc, Hq, q_len, blocks * B]."""
    if part.pool.dtype == mx.float32:
        scores = mx.gather_mm(part.queries, part.pool.swapaxes(-1, -2), rows.query_index, rows.block_index)
    else:
        queries = part.queries if rows.rows is None else part.queries[rows.rows]
        scores = _by_block_matmul(queries[:, None], part.pool[rows.tables].swapaxes(-1, -2))
    count, _, heads, queries_per_row, _ = scores.shape
    return scores.transpose(0, 2, 3, 1, 4).reshape(count, heads, queries_per_row, -1)


def _pool_values(
    weights: mx.array, pool: mx.array, rows: LengthClass, readable: mx.array | None
) -> mx.array:
    """Weights [Rc, Hq, q_len, blocks * B] times the values of the class's blocks -> [Rc, Hq, q_len, Dv]."""
    count, heads, queries, _ = weights.shape
    by_block = weights.reshape(count, heads, queries, rows.num_blocks, -1).transpose(0, 3, 1, 2, 4)
    if pool.dtype == mx.float32 and readable is None:
        return mx.gather_mm(by_block, pool, None, rows.block_index).sum(axis=1)
    values = pool[rows.tables]
    if readable is not None:
        values = mx.where(readable, values, 0.0)
    return _by_block_matmul(by_block, values).sum(axis=1)


def _by_block_matmul(a: mx.array, b: mx.array) -> mx.array:
    """a [Rc, blocks or 1, Hq, n, X] times b [Rc, blocks, Hk, X, Y] -> float32 [Rc, blocks, Hq, n, Y]."""
    count, blocks, kv_heads = b.shape[:3]
    heads, queries, inner = a.shape[2:]
    grouped = a.reshape(count, a.shape[1], kv_heads, heads // kv_heads, queries, inner)
    out = grouped @ b.astype(mx.float32)[:, :, :, None]
    return out.reshape(count, blocks, heads, queries, -1)


def chunk_context(
    pool: mx.array, tail: mx.array, fresh: mx.array, layout: ChunkLayout, spec: AttentionSpec
) -> mx.array:
    """Keys or values that a chunk sees, in order of position: pool, tail, its own [1, Hk, n, D]."""
    parts = []
    block_size, begin = pool.shape[2], layout.first_block * pool.shape[2]
    low = _context_start(layout, block_size, spec)
    if low < layout.flushed:
        blocks = pool[layout.table[low // block_size - layout.first_block :]]
        joined = blocks.swapaxes(0, 1).reshape(1, pool.shape[1], -1, pool.shape[3])
        parts.append(joined[:, :, low - max(begin, low // block_size * block_size) :])
    if layout.flushed < layout.start:
        places = mx.arange(max(low, layout.flushed), layout.start) % tail.shape[2]
        parts.append(tail[layout.slot][None, :, places])
    if not parts:
        return fresh
    return mx.concatenate([part.astype(fresh.dtype) for part in (*parts, fresh)], axis=2)


def _context_start(layout: ChunkLayout, block_size: int, spec: AttentionSpec) -> int:
    """The first position that the chunk's first token sees, as far as its table reaches."""
    low = layout.first_block * block_size
    return low if spec.window is None else max(low, layout.start - spec.window + 1)


def _chunk_mask(layout: ChunkLayout, length: int, width: int, spec: AttentionSpec) -> mx.array | str | None:
    """What `length` queries see of `width` positions, of which they are the last."""
    if spec.window is None or width <= spec.window:
        return "causal" if length > 1 else None
    key = ("reference", "mask", length, width, spec.window)
    found = layout.step.get(key)
    if found is None:
        query = np.arange(width - length, width)[:, None]
        position = np.arange(width)
        found = mx.array((position <= query) & (position > query - spec.window))
        layout.step[key] = found
    return found


def _mask_array(mask: mx.array | str | None, length: int, width: int) -> mx.array | None:
    """A chunk's mask as an array [length, width]."""
    if isinstance(mask, str):
        return mx.arange(width) <= mx.arange(width - length, width)[:, None]
    return mask
