"""LoRA and DoRA adapters, put on a model when it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters
from safetensors import SafetensorError, safe_open

from mlxbatch.errors import ModelError
from mlxbatch.models.lora_peft import PEFT_WEIGHTS, put_on_peft_adapter
from mlxbatch.models.messages import shortened
from mlxbatch.models.weights import cast

MLX_WEIGHTS = "adapters.safetensors"
SETTINGS = "adapter_config.json"
_LEAVES = ("lora_a", "lora_b", "m")


def apply_adapter(model: nn.Module, folder: Path, dtype: mx.Dtype | None) -> list[Path]:
    """Put an adapter on a model, and return the files that it is made of.

    Adapters of mlx-lm (adapters.safetensors) and of the peft library (adapter_model.safetensors), each with
    its adapter_config.json. Strict: every layer that is adapted must have its weights, and every weight a
    layer. Raises ModelError.
    """
    peft = (folder / PEFT_WEIGHTS).is_file()
    weights = folder / (PEFT_WEIGHTS if peft else MLX_WEIGHTS)
    for path in (folder / SETTINGS, weights):
        if not path.is_file():
            raise ModelError(f"{folder} is not an adapter: it holds no {path.name}")
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        with safe_open(weights, framework="numpy") as file:
            given = set(file.keys())
        if peft:
            put_on_peft_adapter(model, settings, weights)
        else:
            _put_on_mlx_adapter(model, settings, folder, given)
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"cannot use the adapter {folder}: {error}") from None
    if dtype is not None:
        cast(model, dtype)
    return [folder / SETTINGS, weights]


def _put_on_mlx_adapter(model: nn.Module, settings: dict[str, Any], folder: Path, given: set[str]) -> None:
    load_adapters(model, str(folder))
    names = [name for name, _ in tree_flatten(model.parameters())]
    full = settings.get("fine_tune_type") == "full"
    wanted = set(names) if full else {name for name in names if name.rpartition(".")[2] in _LEAVES}
    if missing := wanted - given:
        raise ModelError(f"the adapter {folder} lacks weights for {shortened(missing)}")
