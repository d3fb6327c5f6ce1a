"""GGUF's affine blocks, repacked as MLX's affine quantisation without a loss.

Both store w = scale * q + bias with one scale and bias for 32 weights, so nothing is quantised a second
time: only the bits are put in another order, and scales rounded to the dtype they are stored in.

    type          one block of weights
    Q4_0, Q5_0    d (f16)            q in 32     w = d (q - 8), d (q - 16)
    Q4_1, Q5_1    d, m (f16)         q in 32     w = d q + m
    Q8_0          d (f16)            q in 32     w = d q, q signed
    Q4_K, Q5_K    d, dmin (f16)      8 x 32      w = d s_j q - dmin m_j, s_j and m_j of 6 bits

MLX packs q along a row, the lowest bits first (https://ml-explore.github.io/mlx, `mlx.core.quantize`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as Type

GROUP = 32


@dataclass(frozen=True)
class Affine:
    """`q` (..., K) of uint8 below 2^bits; `scales` and `biases` (..., K / 32) in float32."""

    bits: int
    q: np.ndarray
    scales: np.ndarray
    biases: np.ndarray

    def packed(self) -> np.ndarray:
        """`q` as MLX stores it: uint32 of shape (..., K * bits / 32)."""
        if self.bits == 8:
            return np.ascontiguousarray(self.q).view(np.uint32)
        if self.bits == 4:
            return np.ascontiguousarray(self.q[..., 0::2] | self.q[..., 1::2] << 4).view(np.uint32)
        bits = np.unpackbits(self.q[..., None], axis=-1, bitorder="little")[..., : self.bits]
        flat = np.ascontiguousarray(bits).reshape(*self.q.shape[:-1], -1)
        return np.packbits(flat, axis=-1, bitorder="little").view(np.uint32)


def affine_bits(kind: Type) -> int | None:
    """The bits per weight that a type takes in MLX's affine form, or None if it has no such form."""
    return _BITS.get(kind)


def read_affine(raw: np.ndarray, shape: tuple[int, ...], kind: Type) -> Affine:
    """The blocks of a tensor of a type for which `affine_bits` gives a number. `raw` is its bytes."""
    block_bytes, read = _READERS[kind]
    q, scales, biases = read(raw.reshape(-1, block_bytes))
    rows = shape[:-1]
    return Affine(_BITS[kind], q.reshape(shape), scales.reshape(*rows, -1), biases.reshape(*rows, -1))


_Parts = tuple[np.ndarray, np.ndarray, np.ndarray]


def _half(columns: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def _nibbles(columns: np.ndarray) -> np.ndarray:
    """Low halves of the bytes first, then the high halves."""
    return np.concatenate([columns & 15, columns >> 4], axis=-1)


def _fifth_bits(columns: np.ndarray) -> np.ndarray:
    """32 single bits from 4 bytes, as the value 16 or 0."""
    return np.unpackbits(columns, axis=-1, bitorder="little") << 4


def _q4_0(blocks: np.ndarray) -> _Parts:
    d = _half(blocks[:, :2])
    return _nibbles(blocks[:, 2:]), d, -8 * d


def _q4_1(blocks: np.ndarray) -> _Parts:
    return _nibbles(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q5_0(blocks: np.ndarray) -> _Parts:
    d = _half(blocks[:, :2])
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), d, -16 * d


def _q5_1(blocks: np.ndarray) -> _Parts:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return q, _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q8_0(blocks: np.ndarray) -> _Parts:
    d = _half(blocks[:, :2])
    return blocks[:, 2:] ^ 128, d, -128 * d  # two's complement to offset binary


def _six_bit_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 scales and 8 minima of a K-block from their 12 bytes, as float32 (blocks, 8)."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 2) & 48], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 2) & 48], axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _k_nibbles(columns: np.ndarray) -> np.ndarray:
    """256 weights from 128 bytes: of each 32 bytes the low halves, then the high halves."""
    return _nibbles(columns.reshape(-1, 4, 32)).reshape(-1, 256)


def _q4_k(blocks: np.ndarray) -> _Parts:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    return _k_nibbles(blocks[:, 16:]), _half(blocks[:, :2]) * scales, -_half(blocks[:, 2:4]) * minima


def _q5_k(blocks: np.ndarray) -> _Parts:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    # Bit j of byte i of the 32 high bytes belongs to weight i of sub-block j.
    fifth = np.unpackbits(blocks[:, 16:48, None], axis=-1, bitorder="little").swapaxes(1, 2) << 4
    q = _k_nibbles(blocks[:, 48:]) | fifth.reshape(-1, 256)
    return q, _half(blocks[:, :2]) * scales, -_half(blocks[:, 2:4]) * minima


_BITS: Mapping[Type, int] = {
    Type.Q4_0: 4, Type.Q4_1: 4, Type.Q4_K: 4, Type.Q5_0: 5, Type.Q5_1: 5, Type.Q5_K: 5, Type.Q8_0: 8,
}  # fmt: skip
_READERS: Mapping[Type, tuple[int, Callable[[np.ndarray], _Parts]]] = {
    Type.Q4_0: (18, _q4_0),
    Type.Q4_1: (20, _q4_1),
    Type.Q5_0: (22, _q5_0),
    Type.Q5_1: (24, _q5_1),
    Type.Q8_0: (34, _q8_0),
    Type.Q4_K: (144, _q4_k),
    Type.Q5_K: (176, _q5_k),
}
