"""A GGUF file as an mlx-lm model and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlxbatch.models.gguf_config import build_config
from mlxbatch.models.gguf_file import GgufFile, read_gguf
from mlxbatch.models.gguf_tokenizer import build_tokenizer
from mlxbatch.models.gguf_weights import StoredWeight, plan_storage, read_weights
from mlxbatch.models.loaded import ModelParts
from mlxbatch.models.model_class import build_model
from mlxbatch.models.progress import Progress
from mlxbatch.models.weights import load_strictly


def read_gguf_model(path: Path, dtype: mx.Dtype | None, import_bits: int, progress: Progress) -> ModelParts:
    """Import a file. `dtype` None is the file's own half precision. Raises ModelError."""
    file = read_gguf(path)
    config = build_config(file)
    tokenizer = build_tokenizer(file)
    plan = plan_storage(file, import_bits)
    model = build_model(config, path)
    stored_as = _half_precision(file) if dtype is None else dtype
    weights = dict(read_weights(file, plan, config, stored_as, progress))
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)  # some models settle there whether the output layer is tied
    quantization = _quantize_modules(model, plan)
    if quantization:
        config["quantization"] = quantization
    load_strictly(model, weights, path)
    return ModelParts(model, config, tokenizer, list(file.paths))


def _half_precision(file: GgufFile) -> mx.Dtype:
    """bfloat16 if the file was made from it or the model overflows float16 (gemma), else float16."""
    gemma = str(file.metadata.get("general.architecture")).startswith("gemma")
    bfloat16 = any(tensor.type.name == "BF16" for tensor in file.tensors.values())
    return mx.bfloat16 if gemma or bfloat16 else mx.float16


def _quantize_modules(model: nn.Module, plan: list[StoredWeight]) -> dict[str, object] | None:
    """Make the layers whose weights come quantised quantised layers; what config.json would say of it."""
    layers = {
        stored.module: {"group_size": stored.group_size, "bits": stored.bits}
        for stored in plan
        if stored.bits is not None
    }
    if not layers:
        return None
    nn.quantize(model, class_predicate=lambda path, module: layers.get(path, False))
    first = next(iter(layers.values()))
    return {**first, **layers}
