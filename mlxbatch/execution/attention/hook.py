"""The one place where mlxbatch enters a model: `mx.fast.scaled_dot_product_attention`.

A layer's cache hands the model markers instead of arrays of keys and values. The model passes them on to
MLX's attention function untouched; the hook recognises them there and calls the layer that made them.
Everything else goes to MLX's own function.
"""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

from mlxbatch.errors import ModelError


class AttendingLayer(Protocol):
    """`softcap`: scores s become tanh(s / softcap) * softcap; MLX's function has no such thing, adapters do."""

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array: ...


class KVMarker:
    """Stands for the keys or the values that `layer` holds; `fresh` are those of this forward pass."""

    __slots__ = ("fresh", "layer")

    def __init__(self, layer: AttendingLayer, fresh: mx.array) -> None:
        self.layer = layer
        self.fresh = fresh

    @property
    def shape(self) -> tuple[int, ...]:
        """Refused: a model that asks would take the length of this step's keys for that of the context."""
        raise ModelError("it reads the length of the context from the keys that attention holds")

    @property
    def dtype(self) -> mx.Dtype:
        return self.fresh.dtype

    def astype(self, dtype: mx.Dtype) -> KVMarker:
        """Models cast keys and values to the queries' type; attention does that itself."""
        return self


def install_hook() -> None:
    """Put the hook over MLX's function, once per process; markers do not exist outside a forward pass."""
    original = mx.fast.scaled_dot_product_attention
    if hasattr(original, "without_markers"):
        return

    def scaled_dot_product_attention(
        q: mx.array, k: Any, v: Any, *, scale: float, mask: Any = None, sinks: Any = None, **options: Any
    ) -> mx.array:
        if isinstance(k, KVMarker):
            return k.layer.attend(q, scale=scale, mask=mask, sinks=sinks)
        return original(q, k, v, scale=scale, mask=mask, sinks=sinks, **options)

    scaled_dot_product_attention.without_markers = original  # type: ignore[attr-defined]
    scaled_dot_product_attention.__doc__ = original.__doc__
    mx.fast.scaled_dot_product_attention = scaled_dot_product_attention
