"""Paged attention in plain MLX operations: runs anywhere, and is what the kernels are checked against.

Nothing outside the valid positions reaches a result, whatever it holds: invalid keys are masked, and in
place of invalid values a valid one of the same row is read (its weight is zero, but 0 x NaN is NaN).
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from mlxbatch.execution.attention.layout import AttentionSpec, ChunkLayout, DecodeLayout, LayerKV
from mlxbatch.execution.attention.reference_decode import decode_rows, key_part
from mlxbatch.execution.attention.reference_scores import capped, masked, weights_of

# Bytes of scores that a tile of a chunk's queries may have. On a CPU they should stay in its cache (measured: half
# the time of untiled 512 queries at 1,500 positions); on a GPU MLX's fused kernel keeps none.
_CPU_SCORE_BYTES, _GPU_SCORE_BYTES = 2 << 20, 256 << 20


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
        keys = [key_part(q, spec.scale, kv.pool_k, kv.tail_k)]
        return _by_head(decode_rows(keys, kv.pool_v, kv.tail_v, layout, spec, q.shape[2], sinks), q)

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
            scores = masked(capped(scores, spec), _mask_array(mask, length, width))
            by_head = None if sinks is None else sinks[:, None, None]
            return _grouped_matmul(weights_of(scores, by_head), own_values.astype(mx.float32)).astype(q.dtype)

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
            key_part(q_latent, spec.scale, kv.pool_k, kv.tail_k),
            key_part(q_rope, 1.0, kv.pool_v, kv.tail_v),
        ]
        out = decode_rows(keys, kv.pool_k, kv.tail_k, layout, spec, q_latent.shape[2], None)
        return _by_head(out, q_latent)

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
            scores = masked(capped(scores, spec), _mask_array(mask, length, width))
            return _grouped_matmul(weights_of(scores, None), own_latents).astype(part.dtype)

        return _by_query_tiles(attend, q_latent, latents.shape[2], spec, self._score_bytes)


def _by_head(out: mx.array, q: mx.array) -> mx.array:
    """[R, Hk, M, Dv] as [R, Hq, q_len, Dv], of the type of the queries q [R, Hq, q_len, D]."""
    return out.reshape(*q.shape[:3], -1).astype(q.dtype)


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


def _grouped_matmul(a: mx.array, b: mx.array) -> mx.array:
    """a [R, Hq, n, X] times b [R, Hk, X, Y], whose heads serve Hq / Hk heads of `a` each -> [R, Hq, n, Y]."""
    rows, heads, queries, inner = a.shape
    kv_heads = b.shape[1]
    if kv_heads == heads:
        return a @ b
    out = a.reshape(rows, kv_heads, heads // kv_heads, queries, inner) @ b[:, :, None]
    return out.reshape(rows, heads, queries, -1)


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
