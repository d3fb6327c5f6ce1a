"""The weights of a GGUF file as the parameters of an mlx-lm model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from mlxbatch.errors import ModelError
from mlxbatch.models.gguf_architecture import Architecture, architecture_of
from mlxbatch.models.gguf_file import GgufFile, GgufTensor
from mlxbatch.models.gguf_tensors import read_float32, unpermute_rotary
from mlxbatch.models.progress import Progress, silent


def iterate_weights(
    file: GgufFile, config: dict[str, Any], dtype: mx.Dtype, progress: Progress = silent
) -> Iterator[tuple[str, mx.array]]:
    """Yield (mlx-lm parameter name, evaluated array in `dtype`), one tensor at a time.

    Memory beside the results is one tensor in float32. Raises ModelError for tensors without a place.
    """
    architecture = architecture_of(file)
    named = _targets(file, architecture)
    for done, (tensor, target) in enumerate(named):
        progress("reading weights", done, len(named))
        values = _in_model_order(read_float32(file, tensor), target, config, architecture)
        array = mx.array(values).astype(dtype)
        mx.eval(array)
        yield target, array
    progress("reading weights", len(named), len(named))


def _targets(file: GgufFile, architecture: Architecture) -> list[tuple[GgufTensor, str]]:
    named, unknown = [], []
    for name, tensor in file.tensors.items():
        target = architecture.target(name)
        if target is not None:
            named.append((tensor, target))
        elif name not in architecture.consumed:
            unknown.append(name)
    if unknown:
        shown = ", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
        raise ModelError(f"{file.path}: tensors that the model has no place for: {shown}")
    return named


def _in_model_order(
    values: np.ndarray, target: str, config: dict[str, Any], architecture: Architecture
) -> np.ndarray:
    if architecture.norm_offset and "norm" in target:
        return values - architecture.norm_offset
    if architecture.interleaved and ".q_proj." in target:
        return unpermute_rotary(values, config["num_attention_heads"])
    if architecture.interleaved and ".k_proj." in target:
        return unpermute_rotary(values, config["num_key_value_heads"])
    return values
