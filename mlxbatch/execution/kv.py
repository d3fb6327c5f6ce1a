"""The KV memory of a model: every layer's pool and tails, and the flushes that fill the pools."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxbatch.execution.kv_layer import KVLayer, LayerShape
from mlxbatch.scheduling.plan import BlockMove, Flush, GroupSpec, TailBlock

# Layers whose pool writes are evaluated together: a missed in-place write then costs these layers, not the pool.
_LAYERS_PER_EVAL = 8
_OVERRUN_SLACK = 4 << 20


def tail_length(block_size: int, query_length: int = 1, steps_in_flight: int = 1) -> int:
    """Positions that a tail must hold: the part of a block that a flush leaves behind, and what `query_length`
    tokens a row add in this step and in those submitted before a flush can follow, in whole blocks."""
    needed = block_size - 1 + query_length * (1 + steps_in_flight)
    return max(2, -(-needed // block_size)) * block_size


class KVMemory:
    """Pools and tails of all layers. `shapes[i]` is layer i's; every layer is in exactly one group."""

    def __init__(
        self, shapes: Sequence[LayerShape], groups: Sequence[GroupSpec], block_size: int, tail_len: int
    ) -> None:
        self.block_size = block_size
        self.tail_len = tail_len
        self.groups = tuple(groups)
        self.layers = tuple(KVLayer(shape, block_size, tail_len) for shape in shapes)
        group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        self.group_of = tuple(group_of[layer] for layer in range(len(self.layers)))
        self.flushes = 0
        self.flush_overruns = 0  # flushes that took more memory than they write: a pool was copied
        self._peak_bytes = 0
        mx.eval(self.step_arrays(), [layer.pool_arrays for layer in self.layers])

    @property
    def num_slots(self) -> int:
        return self.layers[0].num_slots if self.layers else 0

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks in the pools of each group, block 0 included."""
        return tuple(self.layers[group.layers[0]].num_blocks for group in self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes that pools, tails and pending blocks hold now."""
        return sum(layer.pool_nbytes + layer.tail_nbytes + layer.pending_nbytes for layer in self.layers)

    @property
    def peak_bytes(self) -> int:
        """MLX's peak memory since this object was made. Flushes reset MLX's own counter to watch themselves."""
        return max(self._peak_bytes, int(mx.get_peak_memory()))

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers: what a pending token, and a token of a tail, costs."""
        return sum(layer.shape.bytes_per_token for layer in self.layers)

    def tail_bytes(self, num_slots: int) -> int:
        """Bytes of all tails with `num_slots` slots and scratch. A step may hold them twice, old and new."""
        return (num_slots + 1) * self.tail_len * self.bytes_per_token

    def pool_bytes(self, num_blocks: Sequence[int]) -> int:
        """Bytes of all pools with `num_blocks[g]` blocks in group g."""
        return sum(
            group.bytes_per_block * count for group, count in zip(self.groups, num_blocks, strict=True)
        )

    @property
    def growth_bytes_per_block(self) -> int:
        """What growing to n blocks needs besides the new pool, per block: the largest array, old and new."""
        shapes = [layer.shape for layer in self.layers]
        largest = max(
            (s.kv_heads * max(s.k_dim * s.k_dtype.size, s.v_dim * s.v_dtype.size) for s in shapes), default=0
        )
        return int(largest) * self.block_size

    def step_arrays(self) -> list[mx.array]:
        """Everything a step writes, for the step's one `async_eval`."""
        return [array for layer in self.layers for array in layer.step_arrays()]

    def resize_tails(self, num_slots: int) -> None:
        if num_slots == self.num_slots:
            return
        for layer in self.layers:
            layer.resize_tails(num_slots)

    def copy_tails(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        source_slots, target_slots = mx.array(list(sources)), mx.array(list(targets))
        for layer in self.layers:
            layer.copy_tails(source_slots, target_slots)

    def flush(self, flush: Flush) -> None:
        """Carry out the pool writes of a plan. Waits for the device first: completion handlers hold their
        kernels' inputs until they have run, which is later than the event that `mx.eval` waits for."""
        mx.synchronize()
        self._resize_pools(flush.num_blocks, grow=True)
        expected = self._start_watch(flush)
        before = int(mx.get_active_memory())
        moves = [self._moves_of(flush.moves, group) for group in range(len(self.groups))]
        tails = [self._tail_blocks_of(flush.tail_blocks, group) for group in range(len(self.groups))]
        for first in range(0, len(self.layers), _LAYERS_PER_EVAL):
            written: list[mx.array] = []
            for index in range(first, min(first + _LAYERS_PER_EVAL, len(self.layers))):
                layer, group = self.layers[index], self.group_of[index]
                if flush.pending:
                    layer.flush_pending()
                else:
                    layer.drop_pending()
                if (move := moves[group]) is not None:
                    layer.move_blocks(*move)
                if (tail := tails[group]) is not None:
                    layer.flush_tail_blocks(*tail)
                written += layer.pool_arrays
            mx.eval(written)
        self.flushes += 1
        if int(mx.get_peak_memory()) - before > expected:
            self.flush_overruns += 1
        self._resize_pools(flush.num_blocks, grow=False)

    def drop_pending(self) -> None:
        """Forget chunk blocks that no flush has asked for: their sequences have left."""
        for layer in self.layers:
            layer.drop_pending()

    def _start_watch(self, flush: Flush) -> int:
        """Bytes that the flush may need: what it writes, gathered once and once more as MLX's temporaries."""
        self._peak_bytes = self.peak_bytes
        mx.reset_peak_memory()
        block_bytes = self.block_size * self.bytes_per_token
        written = (len(flush.tail_blocks) + len(flush.moves)) * block_bytes
        if flush.pending:
            written += sum(layer.pending_nbytes for layer in self.layers)
        return 2 * written + _OVERRUN_SLACK

    def _resize_pools(self, num_blocks: Sequence[int], *, grow: bool) -> None:
        for group, count in zip(self.groups, num_blocks, strict=True):
            for index in group.layers:
                layer = self.layers[index]
                if (count > layer.num_blocks) if grow else (count < layer.num_blocks):
                    layer.resize_pool(count)
                    mx.clear_cache()  # the old array's buffer fits nothing that comes after

    @staticmethod
    def _moves_of(moves: Sequence[BlockMove], group: int) -> tuple[mx.array, mx.array] | None:
        own = [move for move in moves if move.group == group]
        if not own:
            return None
        return mx.array([move.src for move in own]), mx.array([move.dst for move in own])

    def _tail_blocks_of(
        self, blocks: Sequence[TailBlock], group: int
    ) -> tuple[mx.array, mx.array, mx.array] | None:
        """Slots, ring blocks and pool blocks of the tail blocks that have a place in `group`."""
        own = [(b.slot, b.start, b.block_ids[group]) for b in blocks if b.block_ids[group] is not None]
        if not own:
            return None
        ring_blocks = self.tail_len // self.block_size
        return (
            mx.array([slot for slot, _, _ in own]),
            mx.array([start // self.block_size % ring_blocks for _, start, _ in own]),
            mx.array([block_id for _, _, block_id in own]),
        )
