"""The values of GGUF tensors, and the row order that mlx-lm expects."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from mlxbatch.errors import ModelError
from mlxbatch.models.gguf_file import GgufFile, GgufTensor

_PLAIN: dict[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F64: np.dtype("<f8"),
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
}


def read_float32(file: GgufFile, tensor: GgufTensor) -> np.ndarray:
    """The values of one tensor as float32, dequantised by the `gguf` package where need be."""
    raw = file.read(tensor)
    plain = _PLAIN.get(tensor.type)
    if plain is not None:
        values: np.ndarray = raw.view(plain)
        return values.astype(np.float32, copy=False).reshape(tensor.shape)
    try:
        with np.errstate(all="ignore"):
            return dequantize(raw.reshape(tensor.shape[0], -1), tensor.type).reshape(tensor.shape)
    except NotImplementedError:
        raise ModelError(
            f"{file.path}: tensor {tensor.name} is stored as {tensor.type.name}, which cannot be read; "
            "use a file in another quantisation, for example Q4_K_M or Q8_0"
        ) from None


def unpermute_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order that llama.cpp gives to attn_q and attn_k of llama-type models.

    GGUF stores each head's rows so that rotary pairs are neighbours (0, h, 1, h+1, ...; h half the head);
    mlx-lm, like the original weights, keeps the two halves apart. `weight` is (heads * head_dim, ...).
    """
    head_dim = weight.shape[0] // heads
    pairs = weight.reshape(heads, head_dim // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)
