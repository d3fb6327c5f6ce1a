"""The layout of int8 and int4 pool blocks (metal_kernels/README.md). The attention kernels read them in
test_decode and test_prefill."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from oracle import TOLERANCE, deviation
from scene import Case, run_decode

from mlxbatch.execution.attention.metal import MetalAttention
from mlxbatch.execution.attention.metal_blocks import (
    dequantize_key_blocks,
    dequantize_value_blocks,
    pack_codes,
    quantize_key_blocks,
    quantize_value_blocks,
    unpack_codes,
)
from mlxbatch.execution.attention.metal_source import KernelFactory

BLOCK = (3, 2, 16, 64)  # blocks, heads, tokens, channels


def test_the_first_of_two_4_bit_codes_takes_the_low_half() -> None:
    packed = pack_codes(mx.array([[1, 2, 15, 0]]), 4)
    assert packed.tolist() == [[0x21, 0x0F]]
    assert unpack_codes(packed, 4).tolist() == [[1, 2, 15, 0]]


@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_of_a_block(bits: int) -> None:
    values = mx.random.normal(BLOCK).astype(mx.float16)
    codes, scales = quantize_key_blocks(values, bits)
    assert codes.shape == (3, 2, 16, 64 * bits // 8) and scales.shape == (3, 2, 2, 64)
    assert (codes.nbytes + scales.nbytes) // 6 == 16 * 64 * bits // 8 + 4 * 64
    codes, scales = quantize_value_blocks(values, bits)
    assert codes.shape == (3, 2, 16, 64 * bits // 8) and scales.shape == (3, 2, 16, 2)
    assert (codes.nbytes + scales.nbytes) // 6 == 16 * 64 * bits // 8 + 4 * 16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bits", [8, 4])
def test_values_come_back_within_half_a_step(bits: int, dtype: str) -> None:
    values = mx.random.normal(BLOCK).astype(getattr(mx, dtype))
    exact = np.array(values.astype(mx.float32))
    keys = np.array(dequantize_key_blocks(*quantize_key_blocks(values, bits), bits))
    tokens = np.array(dequantize_value_blocks(*quantize_value_blocks(values, bits), bits))
    # A rounded scale moves the last code by up to a rounding of the whole range.
    rounding = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-22}[dtype]
    for got, axis in ((keys, 2), (tokens, 3)):
        span = exact.max(axis, keepdims=True) - exact.min(axis, keepdims=True)
        assert (np.abs(got - exact) <= span * (0.5 / (2**bits - 1) + rounding)).all()


def test_a_key_depends_on_the_tokens_of_its_block_and_a_value_does_not() -> None:
    """What block boundaries mean: the same text, shifted by a token, has other keys but the same values."""
    values = mx.random.normal(BLOCK)
    other = mx.concatenate([values[:, :, :-1], values[:, :, -1:] * 9], axis=2)
    keys = [dequantize_key_blocks(*quantize_key_blocks(x, 8), 8)[:, :, 0] for x in (values, other)]
    tokens = [dequantize_value_blocks(*quantize_value_blocks(x, 8), 8)[:, :, 0] for x in (values, other)]
    assert not mx.array_equal(keys[0], keys[1])
    assert mx.array_equal(tokens[0], tokens[1])


@pytest.mark.parametrize("bits", [8, 4])
def test_constant_channels(kernel_factory: KernelFactory, bits: int) -> None:
    """A scale of zero gives the constant back."""
    ones = mx.ones(BLOCK)
    assert mx.array_equal(dequantize_key_blocks(*quantize_key_blocks(ones, bits), bits), ones)
    got, expected = run_decode(MetalAttention(kernel_factory), Case(bits=bits, dtype="float32"), [100, 31])
    assert deviation(got, expected) <= TOLERANCE["float32"]
