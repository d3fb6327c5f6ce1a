"""Llama 4 attends within chunks of positions in three of four layers, and takes its positions from one sequence.

A chunked layer's token p sees [p // chunk * chunk, p]. As long as no row has outgrown its first chunk that is plain
causal attention; beyond, rows attend one by one. Blocks of earlier chunks are freed as those left of a window are.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama4

from mlxbatch.models.adapters.replace import is_paged, replace_class


class PagedModel(llama4.LlamaModel):
    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        if cache is None or not is_paged(cache[0]):
            return super().__call__(inputs, cache)
        hidden = self.embed_tokens(inputs)
        for index, (layer, own) in enumerate(zip(self.layers, cache, strict=True)):
            chunk = self.attention_chunk_size if (index + 1) % 4 else None
            hidden = layer(hidden, chunk, cache=own)
        return self.norm(hidden)


class PagedAttention(llama4.Attention):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """With a paged cache `mask` is the layer's chunk size, or None where it attends to everything."""
        if not is_paged(cache):
            return super().__call__(x, mask, cache)
        rows, length, _ = x.shape
        queries, keys, values = (
            projection(x).reshape(rows, length, heads, -1).transpose(0, 2, 1, 3)
            for projection, heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        if self.use_rope:
            queries, keys = (self.rope(part, offset=cache.offset) for part in (queries, keys))
        if self.use_qk_norm:
            queries, keys = (mx.fast.rms_norm(part, weight=None, eps=1e-6) for part in (queries, keys))
        if self.attn_temperature_tuning and not self.use_rope:
            positions = cache.offset[:, None] + mx.arange(1, length + 1)
            scales = mx.log(mx.floor(positions / self.floor_scale) + 1.0) * self.attn_scale + 1.0
            queries = (queries * scales[:, None, :, None]).astype(queries.dtype)
        cache.update_and_fetch(keys, values)
        if mask is None or cache.longest <= mask:
            output = cache.attend(queries, scale=self.scale, mask=None)
        else:
            output = _attend_in_chunks(queries, cache, self.scale, mask)
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(rows, length, -1))


def _attend_in_chunks(queries: mx.array, cache: Any, scale: float, chunk: int) -> mx.array:
    """queries [T, Hq, 1, D] -> [T, Hq, 1, Dv]."""
    outputs = []
    for row in cache.contexts():
        own = queries[row.begin : row.end].transpose(2, 1, 0, 3)
        query, key = row.query_positions, row.key_positions
        seen = (key <= query) & (key >= query // chunk * chunk)
        keys, values = row.keys.astype(own.dtype), mx.where(_any(seen), row.values, 0).astype(own.dtype)
        output = mx.fast.scaled_dot_product_attention(own, keys, values, scale=scale, mask=seen)
        outputs.append(output.transpose(2, 1, 0, 3))
    return mx.concatenate(outputs)


def _any(seen: mx.array) -> mx.array:
    """[n, 1]: the keys that some query sees; the others' values may be anything, and zero times NaN is NaN."""
    return seen.any(axis=0)[:, None]


def adapt(model: nn.Module) -> None:
    replace_class(model, llama4.LlamaModel, PagedModel)
    replace_class(model, llama4.Attention, PagedAttention)
