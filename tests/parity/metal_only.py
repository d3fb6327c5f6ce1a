"""Stand-ins in plain MLX operations for mlx-lm's layers that exist as Metal kernels only.

What is around them (positions, caches, batching) can then be compared on any machine; the kernels themselves not.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import bitlinear_layers

STAND_INS = ("bitnet",)  # the families that need them


def use_stand_ins() -> None:
    """For this process, where there is no Metal."""
    if not mx.metal.is_available():
        bitlinear_layers.BitLinear.execute_matmul_kernel = ternary_matmul


def ternary_matmul(layer: Any, x: mx.array, packed: mx.array) -> mx.array:
    """x [..., in] times ternary weights: four output rows in the two-bit fields of each byte [out / 4, in]."""
    fields = [((packed >> shift) & 3).astype(x.dtype) - 1 for shift in (0, 2, 4, 6)]
    scale = 1 / layer.weight_scale if layer.invert_weight_scales else layer.weight_scale
    return x @ mx.concatenate(fields).T * scale
