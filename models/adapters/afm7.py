"""AFM's upper layers attend to the last layer's keys and take their own position from the shape of those."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import afm7

from mlxbatch.models.adapters.replace import replace_class


class PagedReuseAttention(afm7.KVReuseAttention):
    def __call__(self, x: mx.array, keys: Any, values: Any, mask: Any = None) -> mx.array:
        layer = getattr(keys, "layer", None)
        if layer is None:
            return super().__call__(x, keys, values, mask)
        rows, length, _ = x.shape
        queries = self.q_proj(x).reshape(rows, length, self.n_heads, -1).transpose(0, 2, 1, 3)
        queries = self.q_norm(self.rope(queries, offset=layer.offset))
        output = layer.attend(queries, scale=self.scale, mask=mask)
        return self.out_proj(output.transpose(0, 2, 1, 3).reshape(rows, length, -1))


def adapt(model: nn.Module) -> None:
    replace_class(model, afm7.KVReuseAttention, PagedReuseAttention)
