"""Gear computes its soft-capped attention in a function of its own, given whatever its cache returned."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gear


def adapt(model: nn.Module) -> None:
    """The function is the module's: it is replaced once per process and passes mlx-lm's own arrays on."""
    original = gear._softcap_attention
    if hasattr(original, "without_markers"):
        return

    def softcap_attention(
        queries: mx.array, keys: Any, values: Any, scale: float, softcap: float, mask: Any
    ) -> mx.array:
        layer = getattr(keys, "layer", None)
        if layer is None:
            return original(queries, keys, values, scale, softcap, mask)
        return layer.attend(queries, scale=scale, mask=mask, softcap=softcap)

    softcap_attention.without_markers = original  # type: ignore[attr-defined]
    gear._softcap_attention = softcap_attention
