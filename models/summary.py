"""What can be said of a model from its files alone: mlx and the weights stay unloaded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxbatch.models.source import LocalModel


@dataclass(frozen=True)
class ModelSummary:
    """`quantization` and `template` are None where the model has none; `weight_bytes` is the size on disk."""

    name: str
    path: str
    format: str
    model_type: str
    layers: int | None
    hidden_size: int | None
    heads: int | None
    kv_heads: int | None
    context: int | None
    vocabulary: int | None
    quantization: str | None
    weight_bytes: int
    template: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(local: LocalModel) -> ModelSummary:
    """Raises ModelError for files that are not a sound model."""
    return _of_gguf(local) if local.kind == "gguf" else _of_directory(local)


def _summary(
    local: LocalModel,
    config: dict[str, Any],
    *,
    kind: str,
    quantization: str | None,
    weight_bytes: int,
    template: str | None,
) -> ModelSummary:
    nested = config.get("text_config")
    text = {**config, **nested} if isinstance(nested, dict) else config
    return ModelSummary(
        name=local.name,
        path=str(local.path),
        format=kind,
        model_type=str(config.get("model_type")),
        layers=text.get("num_hidden_layers"),
        hidden_size=text.get("hidden_size"),
        heads=text.get("num_attention_heads"),
        kv_heads=text.get("num_key_value_heads"),
        context=text.get("max_position_embeddings"),
        vocabulary=text.get("vocab_size"),
        quantization=quantization,
        weight_bytes=weight_bytes,
        template=template,
    )


def _of_gguf(local: LocalModel) -> ModelSummary:
    from mlxbatch.models.gguf_config import build_config
    from mlxbatch.models.gguf_file import read_gguf

    file = read_gguf(local.path)
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    return _summary(
        local,
        build_config(file),
        kind="GGUF",
        quantization=" + ".join(sorted(sizes, key=lambda name: -sizes[name])) or None,
        weight_bytes=sum(tensor.nbytes for tensor in file.tensors.values()),
        template=file.metadata.get("tokenizer.chat_template"),
    )


def _of_directory(local: LocalModel) -> ModelSummary:
    from mlxbatch.models.configuration import read_config

    config = read_config(local.path)
    return _summary(
        local,
        config,
        kind="safetensors",
        quantization=_quantization(config),
        weight_bytes=sum(path.stat().st_size for path in local.path.glob("model*.safetensors")),
        template=_template(local.path),
    )


def _quantization(config: dict[str, Any]) -> str | None:
    settings = config.get("quantization") or config.get("quantization_config")
    if not isinstance(settings, dict):
        return None
    bits, group = settings.get("bits"), settings.get("group_size")
    if bits is None:
        return str(settings.get("quant_method", "unknown"))
    return f"{settings.get('mode', 'affine')} {bits} bit" + (f", groups of {group}" if group else "")


def _template(folder: Path) -> str | None:
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        try:
            text = (folder / name).read_text(encoding="utf-8")
            found = text if name.endswith(".jinja") else json.loads(text).get("chat_template")
        except (OSError, ValueError, AttributeError):
            continue
        if found:
            return found if isinstance(found, str) else json.dumps(found)
    return None
