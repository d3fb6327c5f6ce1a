"""The signature that every paged-attention implementation shares.

Shapes use R decode rows, n chunk tokens, Hq query heads, Hk KV heads, D key width, Dv value width, B block
size, S slots. Position p of a sequence is in its pool blocks if p < flushed, else in its slot's tail at
index p % tail_len. Positions outside the valid ranges may hold anything, inf and NaN included, and must not
reach a result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer's attention needs besides arrays. `window` w lets position p see (p - w, p]."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's KV memory as a step reads it.

    pool_k [N, Hk, B, D], pool_v [N, Hk, B, Dv]; tail_k [S, Hk, tail_len, D], tail_v [S, Hk, tail_len, Dv].
    Latent attention keeps Hk = 1, the compressed K/V (width 512) in `pool_k` and the rotary part (width 64)
    in `pool_v`; keys are both parts side by side and values the first.
    """

    pool_k: mx.array
    pool_v: mx.array
    tail_k: mx.array
    tail_v: mx.array

    @property
    def block_size(self) -> int:
        return int(self.pool_k.shape[2])

    @property
    def tail_len(self) -> int:
        return int(self.tail_k.shape[2])


@dataclass(frozen=True, slots=True, eq=False)
class DecodeLayout:
    """Where the decode rows of one KV group are.

    slots [R]; tables [R, max_blocks] padded with block 0; first_block [R]: the block number that
    `tables[:, 0]` stands for; flushed [R]; lengths [R]: positions that the row's newest token sees,
    itself included. All int32. The `host_` tuples are the same numbers for the host, to size work lists.

    All but the lengths stays the same, array for array, as long as rows and tables do. What an
    implementation derives from those parts (work lists, masks) it keeps in `stable`, which then comes again
    with the next step's layout; what depends on lengths goes into `step`, shared by the layers of one step.
    Keys name the implementation and whatever else the value depends on.
    """

    slots: mx.array
    tables: mx.array
    first_block: mx.array
    flushed: mx.array
    lengths: mx.array
    host_slots: tuple[int, ...]
    host_flushed: tuple[int, ...]
    host_first: tuple[int, ...]
    host_lengths: tuple[int, ...]
    stable: dict[Any, Any] = field(default_factory=dict)
    step: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkLayout:
    """Where one prefill chunk's context is in one KV group: pool [first_block * B, flushed) through `table`
    (int32 [blocks]), the slot's tail [flushed, start), then the chunk's own K and V, positions
    [start, start + num_tokens). `step` as in DecodeLayout."""

    slot: int
    table: mx.array
    first_block: int
    flushed: int
    start: int
    num_tokens: int
    step: dict[Any, Any] = field(default_factory=dict)


class PagedAttention(Protocol):
    """`decode` reads tails as they are after this step's write, `prefill` as they were before it."""

    def decode(
        self,
        q: mx.array,
        kv: LayerKV,
        layout: DecodeLayout,
        spec: AttentionSpec,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """q [R, Hq, q_len, D], the last query being position lengths - 1 -> [R, Hq, q_len, Dv]."""
        ...

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
        """q [1, Hq, n, D], k [1, Hk, n, D], v [1, Hk, n, Dv] -> [1, Hq, n, Dv]."""
        ...

    def decode_latent(
        self,
        q_latent: mx.array,
        q_rope: mx.array,
        kv: LayerKV,
        layout: DecodeLayout,
        spec: AttentionSpec,
    ) -> mx.array:
        """q_latent [R, Hq, q_len, 512] as it is, q_rope [R, Hq, q_len, 64] already multiplied by the scale,
        as mlx-lm's models hand it over -> [R, Hq, q_len, 512]."""
        ...

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
        """The chunk form: q_latent [1, Hq, n, 512], q_rope [1, Hq, n, 64] (scaled), latent [1, 1, n, 512],
        rope [1, 1, n, 64] -> [1, Hq, n, 512]."""
        ...
