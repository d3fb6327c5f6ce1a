"""PLaMo repeats its KV heads before attention: query head h reads KV head h modulo their number.

Attention here shares KV heads between neighbouring query heads, so the query heads change places around it:

    theirs   query 0 1 2 3 4 5 -> KV 0 1 2 0 1 2
    ours     query 0 3 1 4 2 5 -> KV 0 0 1 1 2 2
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import plamo

from mlxbatch.models.adapters.replace import is_paged, replace_class


class PagedAttention(plamo.Attention):
    def __call__(self, hidden_states: mx.array, attention_mask: Any = None, cache: Any = None) -> mx.array:
        if not is_paged(cache):
            return super().__call__(hidden_states, attention_mask, cache)
        rows, length, _ = hidden_states.shape
        shared, kv_heads = self.config.n_shared_head, self.k_num_heads
        queries, keys, values = (
            projection(hidden_states).reshape(rows, length, heads, -1).transpose(0, 2, 1, 3)
            for projection, heads in (
                (self.q_proj, self.q_num_heads),
                (self.k_proj, kv_heads),
                (self.v_proj, self.v_num_heads),
            )
        )
        queries = self.rotary_emb(queries, offset=cache.offset)
        cache.update_and_fetch(self.rotary_emb(keys, offset=cache.offset), values)
        queries = _swap_head_axes(queries, shared, kv_heads)
        output = _swap_head_axes(cache.attend(queries, scale=self.scale, mask=attention_mask), kv_heads, shared)
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(rows, length, -1))


def _swap_head_axes(x: mx.array, outer: int, inner: int) -> mx.array:
    """Head i * inner + j becomes head j * outer + i."""
    rows, _, length, dim = x.shape
    return x.reshape(rows, outer, inner, length, dim).swapaxes(1, 2).reshape(rows, -1, length, dim)


def adapt(model: nn.Module) -> None:
    replace_class(model, plamo.Attention, PagedAttention)
