"""Gemma 2 computes its soft-capped attention by hand."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma2

from mlxbatch.models.adapters.replace import is_paged, replace_class


class PagedAttention(gemma2.Attention):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
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
        queries = self.rope(queries, offset=cache.offset)
        cache.update_and_fetch(self.rope(keys, offset=cache.offset), values)
        output = cache.attend(queries, scale=self.scale, mask=mask, softcap=self.attn_logit_softcapping)
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(rows, length, -1))


def adapt(model: nn.Module) -> None:
    replace_class(model, gemma2.Attention, PagedAttention)
