"""Loading a model: files on this machine to an mlx-lm module in memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes, dequantize_model
from mlx_lm.utils import load_model as load_mlx_lm

from mlxbatch.config import DType
from mlxbatch.errors import ModelError
from mlxbatch.models.directory_tokenizer import load_directory_tokenizer
from mlxbatch.models.gguf_architecture import build_config
from mlxbatch.models.gguf_file import read_gguf
from mlxbatch.models.gguf_tokenizer import build_tokenizer
from mlxbatch.models.gguf_weights import iterate_weights
from mlxbatch.models.loaded import LoadedModel
from mlxbatch.models.progress import Progress, silent
from mlxbatch.models.source import LocalModel, fingerprint, resolve
from mlxbatch.models.tokenizer import ModelTokenizer

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class Weighed:
    """A model read from one kind of source."""

    model: nn.Module
    config: dict[str, Any]
    tokenizer: ModelTokenizer
    files: list[Path]


def load_model(
    spec: str,
    *,
    revision: str | None = None,
    dtype: DType = "auto",
    adapter: str | None = None,
    import_bits: int = 16,
    progress: Progress | None = None,
) -> LoadedModel:
    """See `mlxbatch.models.load`."""
    report = progress or silent
    local = resolve(spec, revision=revision, progress=report)
    wanted = _wanted_dtype(dtype)
    read = _read_gguf(local, wanted, report) if local.kind == "gguf" else _read_directory(local, wanted)
    mx.eval(read.model.parameters())
    read.model.eval()
    return LoadedModel(
        name=local.name,
        model=read.model,
        tokenizer=read.tokenizer,
        config=read.config,
        max_model_len=int(read.config["max_position_embeddings"]),
        eos_token_ids=read.tokenizer.eos_token_ids,
        weight_bytes=sum(array.nbytes for _, array in tree_flatten(read.model.parameters())),
        dtype=_activation_dtype(read.model),
        fingerprint=fingerprint(read.files),
    )


def _wanted_dtype(dtype: DType) -> mx.Dtype | None:
    """The dtype to convert to; None keeps what the model has."""
    if dtype == "auto":
        # Half precision and quantised matmuls bypass BLAS on the CPU backend and are slow there.
        return None if sys.platform == "darwin" else mx.float32
    return _DTYPES[dtype]


def _read_gguf(local: LocalModel, wanted: mx.Dtype | None, progress: Progress) -> Weighed:
    file = read_gguf(local.path)
    config = build_config(file)
    tokenizer = build_tokenizer(file)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    weights = list(iterate_weights(file, config, wanted or mx.float16, progress))
    _load_strictly(model, weights, local.path)
    return Weighed(model, config, tokenizer, [local.path])


def _load_strictly(model: nn.Module, weights: list[tuple[str, mx.array]], path: Path) -> None:
    try:
        model.load_weights(weights, strict=True)
    except ValueError as error:
        raise ModelError(f"{path} does not fit its model: {error}") from None


def _read_directory(local: LocalModel, wanted: mx.Dtype | None) -> Weighed:
    model, config = load_mlx_lm(local.path, lazy=True, strict=True)
    if wanted is not None:
        model = _convert(model, wanted)
    tokenizer = load_directory_tokenizer(local.path, config)
    names = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
    return Weighed(model, config, tokenizer, [path for name in names for path in local.path.glob(name)])


def _convert(model: nn.Module, dtype: mx.Dtype) -> nn.Module:
    """Dequantise to float32 on request for float32; otherwise only convert what is floating point."""
    if dtype == mx.float32:
        model = dequantize_model(model)
    keeps = getattr(model, "cast_predicate", lambda path: True)
    model.update(
        tree_map_with_path(
            lambda path, array: (
                array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) and keeps(path) else array
            ),
            model.parameters(),
        )
    )
    return model


def _activation_dtype(model: nn.Module) -> mx.Dtype:
    """The dtype of the embedding's output, which every layer inherits."""
    for _, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            return module.weight.dtype
        if isinstance(module, nn.QuantizedEmbedding):
            return module.scales.dtype
    return next(a.dtype for _, a in tree_flatten(model.parameters()) if mx.issubdtype(a.dtype, mx.floating))
