"""The weights of a GGUF file as the parameters of an mlx-lm model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from mlxbatch.errors import ModelError
from mlxbatch.models.gguf_affine import GROUP, affine_bits, read_affine
from mlxbatch.models.gguf_architecture import Architecture, architecture_of
from mlxbatch.models.gguf_file import GgufFile, GgufTensor
from mlxbatch.models.gguf_tensors import read_float32, unpermute_rotary
from mlxbatch.models.messages import shortened
from mlxbatch.models.progress import Progress, silent

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class StoredWeight:
    """How one tensor is kept in memory: `bits` is None for the compute dtype, else MLX affine."""

    tensor: GgufTensor
    target: str
    bits: int | None
    group_size: int = GROUP
    lossless: bool = False  # the file's own blocks, repacked

    @property
    def module(self) -> str:
        return self.target.rpartition(".")[0]


def plan_storage(file: GgufFile, import_bits: int) -> list[StoredWeight]:
    """Decide for every tensor how it is stored. Raises ModelError for tensors without a place.

    `import_bits` 16 is the compute dtype; 8 and 4 are MLX affine; 0 keeps the size that the file has where
    quantised matmuls are fast (macOS), and is 16 elsewhere. Blocks that MLX can hold as they are never
    get quantised a second time when they have the wanted bits.
    """
    architecture = architecture_of(file)
    plan, unknown = [], []
    for name, tensor in file.tensors.items():
        target = architecture.target(name)
        if target is not None:
            plan.append(_storage(tensor, target, import_bits))
        elif name not in architecture.consumed:
            unknown.append(name)
    if unknown:
        raise ModelError(f"{file.path} holds tensors that its model has no place for: {shortened(unknown)}")
    return plan


def _storage(tensor: GgufTensor, target: str, import_bits: int) -> StoredWeight:
    exact = affine_bits(tensor.type)
    bits: int | None = None if import_bits == 16 else import_bits
    if import_bits == 0:
        bits = _kept_bits(tensor.type) if sys.platform == "darwin" else None
    width = tensor.shape[-1]
    if bits is None or len(tensor.shape) < 2 or width % GROUP or "ffn_gate_inp" in tensor.name:
        return StoredWeight(tensor, target, None)
    if bits == exact:
        return StoredWeight(tensor, target, bits, GROUP, lossless=True)
    return StoredWeight(tensor, target, bits, 64 if width % 64 == 0 else GROUP)


def _kept_bits(kind: GGMLQuantizationType) -> int | None:
    """The MLX bits that come closest to a type without losing much: K-quants of 3 bits and less take 4."""
    if kind.name in _FLOATS:
        return None
    exact = affine_bits(kind)
    if exact is not None:
        return exact
    weights, nbytes = GGML_QUANT_SIZES[kind]
    return 4 if nbytes * 8 / weights < 4.0 else 8


def read_weights(
    file: GgufFile,
    plan: list[StoredWeight],
    config: dict[str, Any],
    dtype: mx.Dtype,
    progress: Progress = silent,
) -> Iterator[tuple[str, mx.array]]:
    """Yield (parameter name, evaluated array), one tensor at a time.

    Floating-point arrays, scales and biases are in `dtype`. Beside the results, memory holds one tensor
    in float32.
    """
    architecture = architecture_of(file)
    for done, stored in enumerate(plan):
        progress("reading weights", done, len(plan))
        for name, array in _arrays(file, stored, config, architecture, dtype).items():
            mx.eval(array)
            yield name, array
    progress("reading weights", len(plan), len(plan))


def _arrays(
    file: GgufFile,
    stored: StoredWeight,
    config: dict[str, Any],
    architecture: Architecture,
    dtype: mx.Dtype,
) -> dict[str, mx.array]:
    def ordered(values: np.ndarray) -> mx.array:
        return mx.array(_in_model_order(values, stored, config, architecture))

    if affine_bits(stored.tensor.type) is None:
        values = ordered(read_float32(file, stored.tensor))
    else:  # MLX unpacks these blocks itself, to the same numbers and many times faster
        affine = read_affine(file.read(stored.tensor), stored.tensor.shape, stored.tensor.type)
        parts = ordered(affine.packed()), ordered(affine.scales), ordered(affine.biases)
        if stored.lossless:
            return _quantized(stored, parts, dtype)
        values = mx.dequantize(*parts, group_size=GROUP, bits=affine.bits)
    if stored.bits is None:
        return {stored.target: values.astype(dtype)}
    return _quantized(stored, mx.quantize(values, stored.group_size, stored.bits), dtype)


def _quantized(
    stored: StoredWeight, parts: tuple[mx.array, mx.array, mx.array], dtype: mx.Dtype
) -> dict[str, mx.array]:
    weight, scales, biases = parts
    return {
        stored.target: weight,
        f"{stored.module}.scales": scales.astype(dtype),
        f"{stored.module}.biases": biases.astype(dtype),
    }


def _in_model_order(
    values: np.ndarray, stored: StoredWeight, config: dict[str, Any], architecture: Architecture
) -> np.ndarray:
    if architecture.norm_offset and "norm" in stored.target:
        return values - np.float32(architecture.norm_offset)
    if architecture.interleaved:
        for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if stored.module.endswith(projection):
                if values.shape[0] % (2 * config[heads]):
                    raise ModelError(
                        f"{stored.tensor.name}: {values.shape[0]} rows do not make {config[heads]} heads"
                    )
                return unpermute_rotary(values, config[heads])
    return values
