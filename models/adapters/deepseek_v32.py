"""DeepSeek V3.2 and GLM 5: latent attention to the keys that an index finds for every token.

The index has keys of its own, kept in a second cache of the layer. While every row's context is as short as the
number of keys to find, that is plain latent attention; beyond, rows attend one by one.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import deepseek_v32

from mlxbatch.models.adapters.replace import is_paged, replace_class

_UNUSED_WIDTH = 8  # of the values that go with the index's keys


class PagedAttention(deepseek_v32.DeepseekV32Attention):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if cache is None or not is_paged(cache[0]):
            return super().__call__(x, mask, cache)
        rows = x.shape[0]
        offset = cache[0].offset
        compressed = self.q_a_layernorm(self.q_a_proj(x))
        queries = self.q_b_proj(compressed).reshape(rows, 1, self.num_heads, self.q_head_dim).swapaxes(1, 2)
        queries, q_rope = mx.split(queries, [self.qk_nope_head_dim], axis=-1)
        latent, k_rope = mx.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
        k_rope = self.rope(k_rope[:, None], offset)
        q_rope = self.rope(q_rope, offset) * self.scale
        cache[0].update_and_fetch(self.kv_a_layernorm(latent)[:, None], k_rope)
        index = _Index(self.indexer, x, compressed, cache[1])
        queries = self.embed_q(queries)
        if cache[0].longest <= index.count:
            output = cache[0].attend(queries, scale=self.scale, mask=q_rope)
        else:
            output = _attend_to_found(queries * self.scale, q_rope, cache[0], index)
        return self.o_proj(self.unembed_out(output).swapaxes(1, 2).reshape(rows, 1, -1))


class _Index:
    """The tokens' index queries [T, H, 1, D] and head weights [T, H, 1, 1]; their keys go into `cache`."""

    def __init__(self, indexer: Any, x: mx.array, compressed: mx.array, cache: Any) -> None:
        rows, heads = x.shape[0], indexer.n_heads
        queries = indexer.wq_b(compressed).reshape(rows, 1, heads, indexer.head_dim).swapaxes(1, 2)
        keys = indexer.rope(indexer.k_norm(indexer.wk(x))[:, None], offset=cache.offset)
        cache.update_and_fetch(keys, keys[..., :_UNUSED_WIDTH])
        weights = indexer.weights_proj(x) * (heads**-0.5 * indexer.softmax_scale)
        self.count = indexer.index_topk
        self.cache = cache
        self._queries = indexer.rope(queries, offset=cache.offset)
        self._weights = weights.swapaxes(1, 2)[..., None]

    def found(self, row: Any, seen: mx.array) -> mx.array:
        """Which of the row's keys its tokens attend to, [1, 1, n, K]: at most `count` of those `seen` [n, K]."""
        queries, weights = (
            part[row.begin : row.end].transpose(2, 1, 0, 3) for part in (self._queries, self._weights)
        )
        if row.keys.shape[2] <= self.count:
            return seen[None, None]
        scores = (mx.maximum(queries @ row.keys.swapaxes(-1, -2), 0) * weights).sum(axis=1, keepdims=True)
        scores = mx.where(seen, scores, -mx.inf)
        best = mx.argpartition(scores, kth=-self.count, axis=-1)[..., -self.count :]
        return mx.put_along_axis(mx.zeros(scores.shape, mx.bool_), best, mx.array(True), axis=-1) & seen


def _attend_to_found(queries: mx.array, q_rope: mx.array, cache: Any, index: _Index) -> mx.array:
    """queries [T, Hq, 1, R] and q_rope [T, Hq, 1, P], both scaled -> [T, Hq, 1, R]."""
    outputs = []
    for row, keys in zip(cache.contexts(), index.cache.contexts(), strict=True):
        own, own_rope = (part[row.begin : row.end].transpose(2, 1, 0, 3) for part in (queries, q_rope))
        found = index.found(keys, row.key_positions <= row.query_positions)
        scores = own @ row.keys.swapaxes(-1, -2) + own_rope @ row.values.swapaxes(-1, -2)
        weights = mx.softmax(mx.where(found, scores, mx.finfo(scores.dtype).min), axis=-1, precise=True)
        outputs.append((weights @ row.keys).transpose(2, 1, 0, 3))
    return mx.concatenate(outputs)


def adapt(model: nn.Module) -> None:
    replace_class(model, deepseek_v32.DeepseekV32Attention, PagedAttention)
