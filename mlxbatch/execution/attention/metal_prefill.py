"""Launches paged_attention_prefill, in as many dispatches as keep each below a time limit."""

from __future__ import annotations

import mlx.core as mx

from mlxbatch.execution.attention.layout import AttentionSpec, ChunkLayout, LayerKV
from mlxbatch.execution.attention.metal_source import KernelFactory, load_kernel_source
from mlxbatch.execution.attention.metal_work import (
    KV_INPUTS,
    NO_WINDOW,
    Constants,
    chunk_table,
    ints_in,
    kv_inputs,
    kv_template,
    padded,
    score_factors,
)

SIMDGROUPS = 8
TILE = 8
STAGED_BYTES = 18 * 1024  # of 32 KB threadgroup memory, so that more than one threadgroup fits a core
DISPATCH_SECONDS = 0.1  # longer ones make the desktop stutter, and the GPU watchdog kills very long ones

PREFILL_INPUTS = ("queries", "chunk_k", "chunk_v", *KV_INPUTS, "table", "dims", "factors", "sink_logits")


def staged_keys(key_dim: int, value_dim: int, itemsize: int) -> int:
    """Positions that fit the staging buffers: 32, 16 or 8. Rows are 16 bytes longer than their contents."""
    row_bytes = (key_dim + value_dim) * itemsize + 32
    return next(keys for keys in (32, 16, 8) if keys * row_bytes <= STAGED_BYTES or keys == 8)


def positions_per_dispatch(
    num_positions: int, context: int, window: int | None, heads: int, dims: int, flops_per_second: float
) -> int:
    """How many of a chunk's positions one dispatch takes: 2 FLOPs per multiply-add, `dims` = D + Dv for every
    query and position seen."""
    seen = min(context, window or context)
    seconds = 2.0 * heads * dims * seen / flops_per_second
    return max(1, min(num_positions, int(DISPATCH_SECONDS / seconds)))


class PrefillKernel:
    """Prefill attention over K and V apart. `flops_per_second` is what the kernel can be counted on to do."""

    def __init__(self, kernel_factory: KernelFactory, constants: Constants, flops_per_second: float) -> None:
        source = load_kernel_source("paged_attention_prefill")
        self._kernel = kernel_factory(
            name=source.name,
            input_names=PREFILL_INPUTS,
            output_names=("attended",),
            source=source.body,
            header=source.header,
        )
        self._constants = constants
        self._flops_per_second = flops_per_second

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        kv: LayerKV,
        layout: ChunkLayout,
        spec: AttentionSpec,
        sinks: mx.array | None,
    ) -> mx.array:
        _, heads, num_positions, key_dim = q.shape
        value_dim = v.shape[-1]
        context = layout.start + num_positions
        step = positions_per_dispatch(
            num_positions, context, spec.window, heads, key_dim + value_dim, self._flops_per_second
        )
        parts = [
            self._dispatch(q, k, v, kv, layout, spec, sinks, first, min(step, num_positions - first))
            for first in range(0, num_positions, step)
        ]
        attended = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
        return attended.astype(q.dtype)

    def _dispatch(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        kv: LayerKV,
        layout: ChunkLayout,
        spec: AttentionSpec,
        sinks: mx.array | None,
        first: int,
        count: int,
    ) -> mx.array:
        """Positions [first, first + count) of the chunk."""
        _, heads, num_positions, key_dim = q.shape
        dtype = kv.tail_k.dtype
        kv_heads, value_dim = k.shape[1], v.shape[-1]
        group = heads // kv_heads
        tiles = 2 if value_dim <= 64 else 1
        dims = (
            kv_heads,
            group,
            num_positions,
            kv.block_size.bit_length() - 1,
            kv.tail_len,
            layout.slot,
            layout.flushed,
            layout.first_block,
            layout.start,
            spec.window or NO_WINDOW,
            int(sinks is not None),
            first,
            count,
        )
        return self._kernel(
            inputs=[
                q.astype(dtype),
                k.astype(dtype),
                v.astype(dtype),
                *kv_inputs(kv, self._constants),
                chunk_table(layout),
                ints_in(layout.step, dims),
                self._constants.floats(*score_factors(spec)),
                self._constants.no_sinks if sinks is None else padded(sinks.astype(mx.float32)),
            ],
            template=[
                *kv_template(kv, key_dim, value_dim),
                ("TILES", tiles),
                ("KEYS", staged_keys(key_dim, value_dim, dtype.size)),
                ("SIMDGROUPS", SIMDGROUPS),
            ],
            grid=(32 * SIMDGROUPS * -(-count * group // (TILE * tiles * SIMDGROUPS)), kv_heads, 1),
            threadgroup=(32 * SIMDGROUPS, 1, 1),
            output_shapes=[(1, heads, count, value_dim)],
            output_dtypes=[dtype],
        )[0]
