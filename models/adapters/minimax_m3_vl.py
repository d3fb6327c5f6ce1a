"""MiniMax M3: layers that attend to the blocks of keys (blocks of its own, not of memory) that an index finds.

The index has keys of its own, kept in a second cache of the layer. While no row has more blocks than the index may
find, that is plain causal attention; beyond, rows attend one by one.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import minimax_m3_vl

from mlxbatch.models.adapters.replace import is_paged, replace_class

_UNUSED_WIDTH = 8  # of the values that go with the index's keys


class PagedAttention(minimax_m3_vl.Attention):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if cache is None or not is_paged(cache[0]):
            return super().__call__(x, mask, cache)
        offset = cache[0].offset
        queries = _heads(self.q_proj(x), self.num_attention_heads)
        keys = _heads(self.k_proj(x), self.num_key_value_heads)
        if self.use_qk_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = (self.rope(part.swapaxes(1, 2), offset=offset) for part in (queries, keys))
        values = _heads(self.v_proj(x), self.num_key_value_heads).swapaxes(1, 2)
        cache[0].update_and_fetch(keys, values)
        if self.is_sparse_attn:
            found = _heads(self.index_k_proj(x), 1)
            found = self.index_rope(self.index_k_norm(found).swapaxes(1, 2), offset=offset)
            cache[1].update_and_fetch(found, found[..., :_UNUSED_WIDTH])
        if self.is_sparse_attn and cache[0].longest > self.index_topk_blocks * self.index_block_size:
            output = self._attend_to_found(x, queries, cache[0], cache[1])
        else:
            output = cache[0].attend(queries, scale=self.scale, mask=mask)
        return self.o_proj(output.swapaxes(1, 2).reshape(*x.shape[:2], -1))

    def _attend_to_found(self, x: mx.array, queries: mx.array, cache: Any, index: Any) -> mx.array:
        """queries [T, Hq, 1, D] -> [T, Hq, 1, D]."""
        index_queries = self.index_q_norm(_heads(self.index_q_proj(x), self.index_n_heads)).swapaxes(1, 2)
        index_queries = self.index_rope(index_queries, offset=cache.offset)
        outputs = []
        for row, keys in zip(cache.contexts(), index.contexts(), strict=True):
            own, wanted = (part[row.begin : row.end].transpose(2, 1, 0, 3) for part in (queries, index_queries))
            found = self._found(wanted, keys)
            output = mx.fast.scaled_dot_product_attention(
                own, row.keys.astype(own.dtype), row.values.astype(own.dtype), scale=self.scale, mask=found
            )
            outputs.append(output.transpose(2, 1, 0, 3))
        return mx.concatenate(outputs)

    def _found(self, queries: mx.array, row: Any) -> mx.array:
        """Which keys the row's tokens attend to, [1, 1 or Hq, n, K]: those of the best blocks, and of the newest."""
        size, count = self.index_block_size, self.index_topk_blocks
        length = row.keys.shape[2]
        seen = row.key_positions <= row.query_positions
        blocks = -(-length // size)
        if blocks <= count:
            return seen[None, None]
        scores = queries.astype(mx.float32) @ row.keys.astype(mx.float32).swapaxes(-1, -2)
        scores = mx.where(seen, scores, -mx.inf)
        scores = mx.pad(scores, [(0, 0)] * 3 + [(0, blocks * size - length)], constant_values=-mx.inf)
        scores = scores.reshape(*scores.shape[:3], blocks, size).max(axis=-1)
        if self.index_local_blocks > 0:
            newest, number = row.query_positions // size, mx.arange(blocks)
            is_local = (number <= newest) & (number > newest - self.index_local_blocks)
            scores = mx.where(is_local, mx.inf, scores)
        best = mx.argpartition(-scores, kth=count - 1, axis=-1)[..., :count]
        kept = mx.put_along_axis(mx.zeros(scores.shape, mx.bool_), best, mx.array(True), axis=-1)
        kept = mx.repeat(kept, size, axis=-1)[..., :length] & seen
        return mx.repeat(kept, self.num_attention_heads // self.index_n_heads, axis=1)


def _heads(x: mx.array, count: int) -> mx.array:
    """[T, 1, count * D] -> [T, 1, count, D]"""
    return x.reshape(*x.shape[:2], count, -1)


def adapt(model: nn.Module) -> None:
    replace_class(model, minimax_m3_vl.Attention, PagedAttention)
