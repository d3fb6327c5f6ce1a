"""Adapters as the peft library writes them: W x becomes W x + s B A x, with s = alpha / r."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear

from mlxbatch.errors import ModelError
from mlxbatch.models.messages import shortened

PEFT_WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight")
# What would change the mathematics, and the values with which it does not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
}


def put_on_peft_adapter(model: nn.Module, settings: dict[str, Any], weights: Path) -> None:
    """Wrap the adapted layers of a model. Raises ModelError for what cannot be honoured."""
    for key, neutral in _NEUTRAL.items():
        if settings.get(key) not in neutral:
            raise ModelError(f"{weights.parent}: {key} = {settings.get(key)!r:.60} is not supported")
    pairs = _pairs(weights)
    modules = dict(model.named_modules())
    unknown = [path for path in pairs if not isinstance(modules.get(path), (nn.Linear, nn.QuantizedLinear))]
    if unknown:
        raise ModelError(f"{weights.parent} adapts layers that the model does not have: {shortened(unknown)}")
    alpha = float(settings["lora_alpha"])
    wrapped: list[tuple[str, nn.Module]] = []
    for path, (a, b) in pairs.items():
        rank = a.shape[0]
        scale = alpha / rank**0.5 if settings.get("use_rslora") else alpha / rank
        layer = LoRALinear.from_base(modules[path], r=rank, dropout=0.0, scale=scale)
        if layer.lora_a.shape != a.T.shape or layer.lora_b.shape != b.T.shape:
            raise ModelError(f"{weights.parent} is for a model of another size: {path} does not fit")
        layer.lora_a, layer.lora_b = a.T, b.T
        wrapped.append((path, layer))
    model.update_modules(tree_unflatten(wrapped))


def _pairs(weights: Path) -> dict[str, tuple[mx.array, mx.array]]:
    """(A, B) by the path of the layer that they adapt; A is (r, inputs), B is (outputs, r)."""
    halves: dict[str, dict[str, mx.array]] = {}
    strange = []
    arrays: Any = mx.load(str(weights))  # a mapping, for safetensors
    for name, array in arrays.items():
        match = _NAME.fullmatch(name)
        if match is None or array.ndim != 2:
            strange.append(name)
        else:
            halves.setdefault(match[1], {})[match[2]] = array
    strange += [path for path, half in halves.items() if half.keys() != {"A", "B"}]
    if strange:
        raise ModelError(f"{weights.parent} holds weights that make no LoRA layer: {shortened(strange)}")
    return {path: (half["A"], half["B"]) for path, half in halves.items()}
