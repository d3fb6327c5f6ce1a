"""Model families whose mlx-lm code attends by hand or reads its cache in its own way.

An adapter changes how such modules call attention when their cache is a paged one; weights, names and everything
else stay mlx-lm's, and so does what they do with mlx-lm's own caches.
"""

from __future__ import annotations

import importlib
from typing import Any

import mlx.nn as nn

# mlx-lm model file -> module of this package with `adapt(model) -> None`
_ADAPTERS = {
    "afm7": "afm7",
    "deepseek_v32": "deepseek_v32",
    "gear": "gear",
    "gemma2": "gemma2",
    "glm_moe_dsa": "deepseek_v32",
    "gpt_bigcode": "gpt_bigcode",
    "llama4": "llama4",
    "longcat_flash_ngram": "longcat_flash_ngram",
    "minimax_m3_vl": "minimax_m3_vl",
    "plamo": "plamo",
}


def adapter_names() -> tuple[str, ...]:
    return tuple(sorted(_ADAPTERS))


def adapt(model: nn.Module) -> None:
    """Apply the adapters for the families of `model` and of the models inside it, if they need any."""
    families = {type(part).__module__.rpartition(".")[2] for _, part in model.named_modules()}
    for family in sorted(families & _ADAPTERS.keys()):
        module: Any = importlib.import_module(f"mlxbatch.models.adapters.{_ADAPTERS[family]}")
        module.adapt(model)
