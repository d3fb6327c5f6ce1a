"""Quantised pool blocks as the Metal kernels read them (metal_kernels/README.md has the layout and its bytes).

Keys are quantised per channel within a block, values per token, both affine: x = code * scale + bias. A key's
codes thus depend on the tokens that share its block, so the same text quantises alike only when it starts at
the same block boundary; prefix sharing works in whole blocks and keeps that.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxbatch.execution.attention.layout import LayerKV


@dataclass(frozen=True, slots=True)
class QuantizedLayerKV(LayerKV):
    """A layer whose pool holds codes: pool_k and pool_v are uint8 with a last axis of width * bits / 8.

    k_scales [N, Hk, 2, D]: scale and bias of each channel of a block; v_scales [N, Hk, B, 2]: of each token.
    Their dtype is the tails'.
    """

    k_scales: mx.array
    v_scales: mx.array
    bits: int


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """Codes [..., n] -> uint8 [..., n * bits / 8]; of two 4-bit codes the first takes the low half."""
    codes = codes.astype(mx.uint8)
    return codes if bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: mx.array, bits: int) -> mx.array:
    if bits == 8:
        return packed
    return mx.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _quantize(values: mx.array, bits: int, axis: int) -> tuple[mx.array, mx.array, mx.array]:
    """Codes, scales and biases, the last two with `axis` kept at length 1. Scale and bias are rounded to the
    values' dtype first, so that codes are nearest to what will be read back."""
    steps = (1 << bits) - 1
    low, high = mx.min(values, axis=axis, keepdims=True), mx.max(values, axis=axis, keepdims=True)
    scale = ((high.astype(mx.float32) - low.astype(mx.float32)) / steps).astype(values.dtype)
    divisor = mx.where(scale > 0, scale, mx.ones_like(scale)).astype(mx.float32)
    codes = mx.round((values.astype(mx.float32) - low.astype(mx.float32)) / divisor)
    return mx.clip(codes, 0, steps), scale, low


def quantize_key_blocks(keys: mx.array, bits: int) -> tuple[mx.array, mx.array]:
    """Whole blocks [..., B, D] -> codes uint8 [..., B, D * bits / 8] and scales [..., 2, D]."""
    codes, scale, bias = _quantize(keys, bits, axis=-2)
    return pack_codes(codes, bits), mx.concatenate([scale, bias], axis=-2)


def quantize_value_blocks(values: mx.array, bits: int) -> tuple[mx.array, mx.array]:
    """Whole blocks [..., B, Dv] -> codes uint8 [..., B, Dv * bits / 8] and scales [..., B, 2]."""
    codes, scale, bias = _quantize(values, bits, axis=-1)
    return pack_codes(codes, bits), mx.concatenate([scale, bias], axis=-1)


def dequantize_key_blocks(codes: mx.array, scales: mx.array, bits: int) -> mx.array:
    """The inverse of quantize_key_blocks, in float32."""
    scales = scales.astype(mx.float32)
    return unpack_codes(codes, bits).astype(mx.float32) * scales[..., 0:1, :] + scales[..., 1:2, :]


def dequantize_value_blocks(codes: mx.array, scales: mx.array, bits: int) -> mx.array:
    """The inverse of quantize_value_blocks, in float32."""
    scales = scales.astype(mx.float32)
    return unpack_codes(codes, bits).astype(mx.float32) * scales[..., 0:1] + scales[..., 1:2]
