"""The KV arrays of one layer: a pool of immutable blocks and the private tails of running sequences.

    position  0 ............ flushed .............. newest
    array     pool blocks  | tail[slot], p at p % tail_len

A forward pass reads the pool and replaces the tails; only a flush writes the pool. An indexed write on an
MLX array makes a new array, which takes over the old one's buffer only if nothing else holds that. So
flushes are built after `mx.synchronize()`, when no graph reads the pool any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlxbatch.execution.arrays import with_rows
from mlxbatch.execution.attention.layout import LayerKV


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores per token: `kv_heads` keys of `k_dim` and values of `v_dim` numbers.

    Latent attention stores the compressed part as keys and the rotary part as values, with one head.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    k_dtype: mx.Dtype
    v_dtype: mx.Dtype

    @property
    def bytes_per_token(self) -> int:
        return self.kv_heads * (self.k_dim * int(self.k_dtype.size) + self.v_dim * int(self.v_dtype.size))


@dataclass(frozen=True, slots=True, eq=False)
class TailPlaces:
    """Places in the tails for w tokens: slots and ring indices (position % tail_len), int32 [w] on the host."""

    slots: np.ndarray
    ring: np.ndarray
    _index: dict[int, tuple[mx.array, ...]] = field(default_factory=dict)

    def index(self, kv_heads: int) -> tuple[mx.array, ...]:
        """Indices of the first three axes of a tail [slots, kv_heads, tail_len, dim]: int32 [w, kv_heads] each."""
        found = self._index.get(kv_heads)
        if found is None:
            heads = np.arange(kv_heads, dtype=np.int32)
            places = np.stack(np.broadcast_arrays(self.slots[:, None], heads, self.ring[:, None]))
            found = tuple(mx.array(places))
            self._index[kv_heads] = found
        return found


@dataclass(frozen=True, slots=True, eq=False)
class TailWrite:
    """Tokens of a forward pass that go into tails: flat token indices int32 [w] (None: all, in order)."""

    tokens: mx.array | None
    places: TailPlaces


@dataclass(frozen=True, slots=True, eq=False)
class PendingWrite:
    """Full blocks that the chunks of a forward pass complete in one KV group.

    `sources` int32 [blocks, block_size] indexes the T fresh tokens followed by the tokens at `held`, which
    the tails held before this step (None: no chunk starts inside a block). `block_ids` int32 [blocks].
    """

    sources: mx.array
    held: TailPlaces | None
    block_ids: mx.array


class KVLayer:
    """Pool, tails and pending blocks of one layer; shapes as in `LayerKV`. The last slot is scratch."""

    def __init__(self, shape: LayerShape, block_size: int, tail_len: int) -> None:
        self.shape = shape
        self.block_size = block_size
        self.tail_len = tail_len
        self._pool = self._zeros(1, block_size)
        self._tail = self._zeros(1, tail_len)
        # Block ids with K and V [blocks, block_size, kv_heads, dim], until the flush of the next plan.
        self._pending: list[tuple[mx.array, mx.array, mx.array]] = []

    def _zeros(self, count: int, length: int) -> tuple[mx.array, mx.array]:
        shape = self.shape
        return (
            mx.zeros((count, shape.kv_heads, length, shape.k_dim), shape.k_dtype),
            mx.zeros((count, shape.kv_heads, length, shape.v_dim), shape.v_dtype),
        )

    @property
    def num_blocks(self) -> int:
        return int(self._pool[0].shape[0])

    @property
    def num_slots(self) -> int:
        """Tail slots, scratch not counted."""
        return int(self._tail[0].shape[0]) - 1

    @property
    def pool_nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self._pool)

    @property
    def tail_nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self._tail)

    @property
    def pending_nbytes(self) -> int:
        return sum(int(k.nbytes + v.nbytes) for _, k, v in self._pending)

    @property
    def pool_arrays(self) -> tuple[mx.array, mx.array]:
        return self._pool

    @property
    def kv(self) -> LayerKV:
        """The arrays as they are now; later writes replace arrays and do not show through it."""
        return LayerKV(*self._pool, *self._tail)

    def step_arrays(self) -> list[mx.array]:
        """What a step leaves behind, to be evaluated with it: nothing lazy may outlive a step."""
        return [*self._tail, *(array for _, k, v in self._pending for array in (k, v))]

    def write(
        self, k: mx.array, v: mx.array, write: TailWrite | None, pending: PendingWrite | None
    ) -> None:
        """Take the fresh K [T, kv_heads, k_dim] and V [T, kv_heads, v_dim] of a forward pass; an axis of length
        one before the last is allowed.

        Pending blocks are put together from the tails as they were, before the ring indices are reused.
        """
        if pending is not None:
            k_blocks = self._gather_blocks(k, self._tail[0], pending)
            v_blocks = self._gather_blocks(v, self._tail[1], pending)
            self._pending.append((pending.block_ids, k_blocks, v_blocks))
        if write is None:
            return
        index = write.places.index(self.shape.kv_heads)
        if write.tokens is not None:
            k, v = k[write.tokens], v[write.tokens]
        self._tail = (_set_tokens(self._tail[0], index, k), _set_tokens(self._tail[1], index, v))

    def _gather_blocks(self, fresh: mx.array, tail: mx.array, pending: PendingWrite) -> mx.array:
        kv_heads, dim = tail.shape[1], tail.shape[3]
        fresh = fresh.reshape(-1, kv_heads, dim)
        if pending.held is not None:
            fresh = mx.concatenate([fresh, tail[pending.held.index(kv_heads)]])
        return fresh[pending.sources]

    def copy_tails(self, sources: mx.array, targets: mx.array) -> None:
        """Tail slots `targets` become copies of `sources` (int32 [n] each)."""
        self._tail = (
            with_rows(self._tail[0], targets, self._tail[0][sources]),
            with_rows(self._tail[1], targets, self._tail[1][sources]),
        )

    def resize_tails(self, num_slots: int) -> None:
        """Keep the slots below `num_slots`; new ones and scratch start as zeros."""
        kept = min(num_slots, self.num_slots)
        fresh = self._zeros(num_slots + 1 - kept, self.tail_len)
        self._tail = (
            mx.concatenate([self._tail[0][:kept], fresh[0]]),
            mx.concatenate([self._tail[1][:kept], fresh[1]]),
        )

    def drop_pending(self) -> None:
        self._pending = []

    def flush_pending(self) -> None:
        """Write the pending blocks into the pool (lazily; evaluate `pool_arrays`)."""
        for block_ids, k, v in self._pending:
            self._pool = (
                with_rows(self._pool[0], block_ids, k.swapaxes(1, 2)),
                with_rows(self._pool[1], block_ids, v.swapaxes(1, 2)),
            )
        self._pending = []

    def flush_tail_blocks(self, slots: mx.array, ring_blocks: mx.array, block_ids: mx.array) -> None:
        """Write block `ring_blocks[i]` of the tail of `slots[i]` to pool block `block_ids[i]` (lazily)."""
        k, v = (
            tail.reshape(*tail.shape[:2], -1, self.block_size, tail.shape[3])[slots, :, ring_blocks]
            for tail in self._tail
        )
        self._pool = (with_rows(self._pool[0], block_ids, k), with_rows(self._pool[1], block_ids, v))

    def move_blocks(self, sources: mx.array, targets: mx.array) -> None:
        """Copy pool blocks, all read before any is written. Evaluates the pool before and after: a reader
        in the same graph as the write would make MLX copy the whole pool."""
        mx.eval(self._pool)
        blocks = (self._pool[0][sources], self._pool[1][sources])
        mx.eval(blocks)
        mx.synchronize()
        self._pool = (
            with_rows(self._pool[0], targets, blocks[0]),
            with_rows(self._pool[1], targets, blocks[1]),
        )
        mx.eval(self._pool)

    def resize_pool(self, num_blocks: int) -> None:
        """Grow with zeros or cut to `num_blocks`, one array at a time, so that the peak is one array more."""
        if num_blocks == self.num_blocks:
            return
        self._pool = (_resized(self._pool[0], num_blocks), self._pool[1])
        self._pool = (self._pool[0], _resized(self._pool[1], num_blocks))


def _set_tokens(tail: mx.array, index: tuple[mx.array, ...], tokens: mx.array) -> mx.array:
    return with_rows(tail, index, tokens.reshape(*index[0].shape, -1))


def _resized(array: mx.array, count: int) -> mx.array:
    kept = min(count, array.shape[0])
    if kept == count:
        out = mx.contiguous(array[:count], allow_col_major=False)
    else:
        out = mx.zeros((count, *array.shape[1:]), array.dtype)
        out[:kept] = array
    mx.eval(out)
    return out
