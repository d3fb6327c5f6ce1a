"""Launches paged_attention_latent for decode rows and for prefill chunks."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxbatch.execution.attention.layout import AttentionSpec, ChunkLayout, DecodeLayout, LayerKV
from mlxbatch.execution.attention.metal_decode import MergeKernel
from mlxbatch.execution.attention.metal_prefill import positions_per_dispatch
from mlxbatch.execution.attention.metal_source import KernelFactory, load_kernel_source
from mlxbatch.execution.attention.metal_work import (
    LOG2_E,
    NO_WINDOW,
    Constants,
    chunk_table,
    decode_work,
    ints_in,
    row_lengths,
)

LATENT_DIM = 512
ROPE_DIM = 64
THREADS = 256
TILE = 8
EVERYTHING = 1 << 30  # a chunk length, or a position, beyond any context

LATENT_INPUTS = (
    "query_latent",
    "query_rope",
    "pool_latent",
    "pool_rope",
    "tail_latent",
    "tail_rope",
    "chunk_latent",
    "chunk_rope",
    "tables",
    "row_info",
    "row_length",
    "work",
    "dims",
    "factors",
)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one launch: their metadata arrays, and how many pieces of work they are cut into."""

    tables: mx.array
    row_info: mx.array
    lengths: mx.array
    items: mx.array
    num_items: int
    direct: bool


class LatentKernels:
    """Attention over one compressed K/V head of width 512 and its rotary part of width 64."""

    def __init__(
        self, kernel_factory: KernelFactory, constants: Constants, chunk_tokens: int, flops_per_second: float
    ) -> None:
        source = load_kernel_source("paged_attention_latent")
        self._kernel = kernel_factory(
            name=source.name,
            input_names=LATENT_INPUTS,
            output_names=("attended", "stats"),
            source=source.body,
            header=source.header,
        )
        self._merge = MergeKernel(kernel_factory)
        self._constants = constants
        self._chunk = chunk_tokens
        self._flops_per_second = flops_per_second

    def decode(
        self, q_latent: mx.array, q_rope: mx.array, kv: LayerKV, layout: DecodeLayout, spec: AttentionSpec
    ) -> mx.array:
        rows, heads, q_len, _ = q_latent.shape
        work = decode_work(layout, kv, self._chunk)
        window = spec.window or NO_WINDOW
        shift = kv.block_size.bit_length() - 1
        values = (
            heads,
            q_len,
            shift,
            kv.tail_len,
            work.table_width,
            window,
            self._chunk,
            EVERYTHING,
            0,
            q_len,
        )
        dims = ints_in(layout.stable, values)
        no_chunk = self._constants.nothing(kv.tail_k.dtype)
        attended, stats = self._launch(
            q_latent,
            q_rope,
            no_chunk,
            no_chunk,
            kv,
            _Rows(
                work.tables,
                work.row_info,
                row_lengths(layout),
                work.items,
                work.num_items,
                not work.needs_merge,
            ),
            dims,
            spec,
            q_len,
        )
        if work.needs_merge:
            merge_dims = ints_in(layout.stable, (1, heads, q_len, 0, 0, 0, 0, 0, 0))
            shape = (rows, heads, q_len, LATENT_DIM)
            attended = self._merge(
                attended, stats, work, merge_dims, self._constants.no_sinks, shape, kv.tail_k.dtype
            )
        return attended.astype(q_latent.dtype)

    def prefill(
        self,
        q_latent: mx.array,
        q_rope: mx.array,
        latent: mx.array,
        rope: mx.array,
        kv: LayerKV,
        layout: ChunkLayout,
        spec: AttentionSpec,
    ) -> mx.array:
        _, heads, num_positions, _ = q_latent.shape
        context = layout.start + num_positions
        table = chunk_table(layout)
        rows = _Rows(
            table,
            ints_in(layout.step, (layout.slot, layout.flushed, layout.first_block)),
            ints_in(layout.step, (context,)),
            ints_in(layout.step, (0, 0)),
            1,
            True,
        )
        step = positions_per_dispatch(
            num_positions, context, spec.window, heads, 2 * LATENT_DIM + ROPE_DIM, self._flops_per_second
        )
        parts = []
        for first in range(0, num_positions, step):
            count = min(step, num_positions - first)
            values = (
                heads,
                num_positions,
                kv.block_size.bit_length() - 1,
                kv.tail_len,
                table.size,
                spec.window or NO_WINDOW,
                EVERYTHING,
                layout.start,
                first,
                count,
            )
            dims = ints_in(layout.step, values)
            parts.append(self._launch(q_latent, q_rope, latent, rope, kv, rows, dims, spec, count)[0])
        attended = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
        return attended.astype(q_latent.dtype)

    def _launch(
        self,
        q_latent: mx.array,
        q_rope: mx.array,
        chunk_latent: mx.array,
        chunk_rope: mx.array,
        kv: LayerKV,
        rows: _Rows,
        dims: mx.array,
        spec: AttentionSpec,
        num_positions: int,
    ) -> list[mx.array]:
        num_rows, heads, _, _ = q_latent.shape
        dtype = kv.tail_k.dtype
        tiles = 1 if heads * num_positions <= TILE else 2
        num_queries = heads * num_positions
        shape = (num_rows, heads, num_positions, LATENT_DIM)
        return self._kernel(
            inputs=[
                q_latent.astype(dtype),
                q_rope.astype(dtype),
                kv.pool_k,
                kv.pool_v,
                kv.tail_k,
                kv.tail_v,
                chunk_latent.astype(dtype),
                chunk_rope.astype(dtype),
                rows.tables,
                rows.row_info,
                rows.lengths,
                rows.items,
                dims,
                self._constants.floats(spec.scale * LOG2_E),
            ],
            template=[
                ("T", dtype),
                ("Out", dtype if rows.direct else mx.float32),
                ("TILES", tiles),
                ("DIRECT", rows.direct),
            ],
            grid=(THREADS * -(-num_queries // (TILE * tiles)), 1, rows.num_items),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[
                shape if rows.direct else (rows.num_items, num_queries, LATENT_DIM),
                (rows.num_items, num_queries, 2),
            ],
            output_dtypes=[dtype if rows.direct else mx.float32, mx.float32],
        )
