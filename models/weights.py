"""Putting weights into an mlx-lm model, strictly, and changing what they are stored as."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxbatch.errors import ModelError
from mlxbatch.models.messages import shortened


def load_strictly(model: nn.Module, weights: Mapping[str, mx.array], path: Path) -> None:
    """Set every parameter. Raises ModelError that lists what is missing, unexpected, or of another shape."""
    expected = dict(tree_flatten(model.parameters()))
    complaints = []
    if missing := expected.keys() - weights.keys():
        complaints.append(f"missing weights: {shortened(missing)}")
    if unexpected := weights.keys() - expected.keys():
        complaints.append(f"unexpected weights: {shortened(unexpected)}")
    if odd := [
        f"{name} {weights[name].shape} instead of {expected[name].shape}"
        for name in expected.keys() & weights.keys()
        if weights[name].shape != expected[name].shape
    ]:
        complaints.append(f"weights of another shape: {shortened(odd)}")
    if complaints:
        raise ModelError(f"{path} does not fit its model; " + "; ".join(complaints))
    model.load_weights(list(weights.items()), strict=True)


def dequantize(model: nn.Module, dtype: mx.Dtype) -> None:
    """Replace every quantised layer by a plain one, with weights in `dtype`.

    Scales are widened before they are used, so that float32 weights are exact, not rounded to bfloat16.
    """
    replaced: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)):
            continue
        weight = _plain_weight(module, dtype)
        plain: nn.Module
        if isinstance(module, nn.QuantizedEmbedding):
            plain = nn.Embedding(*weight.shape)
        elif isinstance(module, nn.QuantizedLinear):
            plain = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in module)
        else:
            plain = SwitchLinear(weight.shape[2], weight.shape[1], weight.shape[0], bias="bias" in module)
        plain.weight = weight
        if "bias" in module:
            plain.bias = module.bias
        replaced.append((name, plain))
    if replaced:
        model.update_modules(tree_unflatten(replaced))


def _plain_weight(module: nn.Module, dtype: mx.Dtype) -> mx.array:
    affine = module.mode == "affine"
    scales = module.scales.astype(mx.float32) if affine else module.scales
    biases = module.biases.astype(mx.float32) if affine else None
    options = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode, "dtype": mx.float32}
    scale = module.get("global_scale")
    if scale is None or scale.ndim == 0:
        weight = mx.dequantize(module.weight, scales, biases, global_scale=scale, **options)
    else:  # one nvfp4 tensor scale for each expert
        weight = mx.stack(
            [
                mx.dequantize(module.weight[e], scales[e], None, global_scale=scale[e], **options)
                for e in range(scale.shape[0])
            ]
        )
    return weight.astype(dtype)


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Store floating-point parameters in `dtype`, but for those that the model keeps in float32."""
    castable = getattr(model, "cast_predicate", None) or (lambda path: True)
    model.update(
        tree_map_with_path(
            lambda path, array: (
                array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) and castable(path) else array
            ),
            model.parameters(),
        )
    )


def activation_dtype(model: nn.Module) -> mx.Dtype:
    """The dtype of the embedding's output, which every layer inherits."""
    for _, module in model.named_modules():
        if isinstance(module, nn.QuantizedEmbedding) and module.mode == "affine":
            return module.scales.dtype
        if isinstance(module, nn.Embedding) and not isinstance(module, nn.QuantizedEmbedding):
            return module.weight.dtype
    floats = (a.dtype for _, a in tree_flatten(model.parameters()) if mx.issubdtype(a.dtype, mx.floating))
    return next(floats, mx.float32)
