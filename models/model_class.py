"""From a configuration to an mlx-lm model, without running anything that came with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import MODEL_REMAPPING, _get_classes

from mlxbatch.errors import ModelError
from mlxbatch.models.support import check_supported

_MAX_LAYERS = 4096
_MAX_WIDTH = 1 << 24
_WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_local_experts",
    "num_experts",
)


def check_config(config: dict[str, Any], path: Path) -> None:
    """Refuse configurations that ask for code of their own, or for absurd sizes. Raises ModelError."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", model_type):
        raise ModelError(f"{path}: config.json names no model_type, so there is no telling what model this is")
    if config.get("model_file") is not None:
        raise ModelError(
            f"{path}: this model wants to run its own code ({config['model_file']!r}), which mlxbatch never does"
        )
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        layers = part.get("num_hidden_layers", 1)
        if not isinstance(layers, int) or not 0 < layers <= _MAX_LAYERS:
            raise ModelError(f"{path}: num_hidden_layers is {layers!r:.40}, not 1 to {_MAX_LAYERS}")
        for key in _WIDTHS:
            value = part.get(key, 1)
            if isinstance(value, int) and not 0 <= value <= _MAX_WIDTH:
                raise ModelError(f"{path}: {key} is {value!r:.40}, not up to {_MAX_WIDTH}")


def build_model(config: dict[str, Any], path: Path) -> nn.Module:
    """An mlx-lm model with lazy random weights. Raises ModelError for a type that mlx-lm does not have."""
    check_config(config, path)
    model_class, args_class = model_classes(config)
    try:
        return model_class(args_class.from_dict(config))
    except Exception as error:  # every model file reads its configuration in its own way
        raise ModelError(
            f"{path}: mlx-lm cannot build a {config['model_type']} model from this configuration: "
            f"{type(error).__name__}: {error}"
        ) from None


def model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's (Model, ModelArgs) for a configuration. Raises ModelError naming the type, and why it is refused."""
    model_type = config["model_type"]
    known = MODEL_REMAPPING.get(model_type, model_type)
    check_supported(known)
    try:
        model_class, args_class = _get_classes(config)
    except Exception:
        raise ModelError(f"model type {model_type!r} is not supported: mlx-lm has no {known!r}") from None
    return model_class, args_class
