"""Latent attention in models that also have recurrent layers.

Such models run a prefill chunk as [1, n], for which mlx-lm's attention expands the compressed keys and values of
the whole context. Its form for one token, which keeps them compressed, is the one that paged attention covers: so
the attention modules, and only these, see a chunk as n rows of one token.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxbatch.execution.cache import LatentLayerCache


def is_latent_attention(module: nn.Module) -> bool:
    """mlx-lm's attention modules with an absorbed form have these two projections."""
    return hasattr(module, "embed_q") and hasattr(module, "unembed_out")


def attend_token_by_token(model: nn.Module) -> None:
    """Give the model's latent attention modules a subclass of their own class that turns chunks into rows."""
    for _, module in model.named_modules():
        if is_latent_attention(module) and not hasattr(type(module), "takes_chunks_as_rows"):
            module.__class__ = _by_token(type(module))


def _by_token(base: Any) -> type:
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None, **options: Any) -> mx.array:
        if not isinstance(cache, LatentLayerCache) or x.shape[1] == 1:
            return base.__call__(self, x, mask, cache, **options)
        rows = base.__call__(self, x.swapaxes(0, 1), mask, cache.by_token(), **options)
        return rows.swapaxes(0, 1)

    return type(base.__name__, (base,), {"__call__": call, "takes_chunks_as_rows": True})
