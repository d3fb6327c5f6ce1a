"""A model in memory, with everything that the engine needs to know about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

    from mlxbatch.models.tokenizer import ModelTokenizer


@dataclass(frozen=True)
class LoadedModel:
    """`model` is an mlx-lm module in eval mode with its weights in memory.

    `fingerprint` names the content (weights, configuration, tokenizer, adapter), not the place it came
    from: the same files give the same string on another machine. `dtype` is that of the activations.
    """

    name: str
    model: nn.Module
    tokenizer: ModelTokenizer
    config: dict[str, Any]
    max_model_len: int
    eos_token_ids: frozenset[int]
    weight_bytes: int
    dtype: mx.Dtype
    fingerprint: str


@dataclass(frozen=True)
class ModelParts:
    """What one kind of source gives, weights still lazy where they can be. `files` make the fingerprint."""

    model: nn.Module
    config: dict[str, Any]
    tokenizer: ModelTokenizer
    files: list[Path]
