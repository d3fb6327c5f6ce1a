"""An mlx-lm or Hugging Face directory as a model and its tokenizer. Only safetensors are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model as load_mlx_lm
from safetensors import SafetensorError, safe_open

from mlxbatch.errors import ModelError
from mlxbatch.models.configuration import read_config
from mlxbatch.models.directory_tokenizer import load_directory_tokenizer
from mlxbatch.models.loaded import ModelParts
from mlxbatch.models.messages import shortened
from mlxbatch.models.model_class import check_config, model_classes
from mlxbatch.models.weights import cast, dequantize

_FINGERPRINTED = ("model*.safetensors", "config.json", "generation_config.json", "tokenizer*", "*.jinja")


def read_directory_model(folder: Path, dtype: mx.Dtype | None) -> ModelParts:
    """Load a directory. `dtype` None keeps what it has; float32 dequantises. Raises ModelError."""
    config = read_config(folder)
    check_config(config, folder)
    check_safetensors(folder)
    model, config = _load(folder)
    if dtype is not None:  # None compares with a dtype only by raising
        if dtype == mx.float32:
            dequantize(model, dtype)
        cast(model, dtype)
    files = {path for pattern in _FINGERPRINTED for path in folder.glob(pattern) if path.is_file()}
    return ModelParts(model, config, load_directory_tokenizer(folder, config), sorted(files))


def check_safetensors(folder: Path) -> None:
    """Check that all weight files are there and that their headers are sound. Raises ModelError.

    The `safetensors` package compares every offset with the file's size; mlx's own reader trusts them.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        others = [path.name for suffix in ("*.bin", "*.pt", "*.pth", "*.npz") for path in folder.glob(suffix)]
        found = f"; it holds {shortened(others, 4)}, which can run code when read" if others else ""
        raise ModelError(f"{folder} holds no model*.safetensors, the only weights that are read{found}")
    if missing := _shards(folder) - {path.name for path in files}:
        raise ModelError(f"{folder} is incomplete, missing {shortened(missing)}; fetch the model again")
    for path in files:
        try:
            with safe_open(path, framework="numpy") as file:
                file.keys()
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path} is damaged or cut short ({error}); fetch it again") from None


def _shards(folder: Path) -> set[str]:
    """The weight files that the index names, if there is an index."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return set()
    try:
        names = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{path} is damaged; fetch it again") from None
    return {name for name in names if isinstance(name, str)}


def _load(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    try:
        return load_mlx_lm(folder, lazy=True, strict=True, get_model_classes=model_classes)
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{folder} does not fit its model: {_clipped(str(error))}") from None
    except Exception as error:  # a model file's own way of reading weights
        raise ModelError(f"cannot load {folder}: {type(error).__name__}: {_clipped(str(error))}") from None


def _clipped(text: str, limit: int = 1500) -> str:
    """mlx-lm lists every missing weight, which can be thousands."""
    return text if len(text) <= limit else f"{text[:limit].rstrip()} ... and more"
