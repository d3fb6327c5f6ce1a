"""LoRA and DoRA adapters, put on a model when it is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters
from safetensors import SafetensorError, safe_open

from mlxbatch.errors import ModelError
from mlxbatch.models.messages import shortened
from mlxbatch.models.weights import cast

_LEAVES = ("lora_a", "lora_b", "m")


def apply_adapter(model: nn.Module, folder: Path, dtype: mx.Dtype | None) -> list[Path]:
    """Put an mlx-lm adapter (adapter_config.json, adapters.safetensors) on a model; the files it is made of.

    Strict: every adapter layer that the configuration names must have its weights. Raises ModelError.
    """
    settings, weights = folder / "adapter_config.json", folder / "adapters.safetensors"
    if (folder / "adapter_model.safetensors").exists():
        raise ModelError(
            f"{folder} is an adapter of the peft library; mlxbatch reads those that mlx_lm.lora writes "
            "(adapters.safetensors)"
        )
    for path in (settings, weights):
        if not path.is_file():
            raise ModelError(f"{folder} is not an adapter: it holds no {path.name}")
    try:
        kind = json.loads(settings.read_text(encoding="utf-8")).get("fine_tune_type", "lora")
        with safe_open(weights, framework="numpy") as file:
            given = set(file.keys())
        load_adapters(model, str(folder))
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"cannot use the adapter {folder}: {error}") from None
    names = [name for name, _ in tree_flatten(model.parameters())]
    wanted = set(names) if kind == "full" else {name for name in names if name.rpartition(".")[2] in _LEAVES}
    if missing := wanted - given:
        raise ModelError(f"the adapter {folder} lacks weights for {shortened(missing)}")
    if dtype is not None:
        cast(model, dtype)
    return [settings, weights]
