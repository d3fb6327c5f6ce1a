"""The config.json that mlx-lm would read for the model in a GGUF file."""

from __future__ import annotations

from typing import Any

from mlxbatch.models.gguf_architecture import architecture_of
from mlxbatch.models.gguf_file import GgufFile
from mlxbatch.models.gguf_metadata import Metadata


def build_config(file: GgufFile) -> dict[str, Any]:
    """Raises ModelError for an unknown architecture and for metadata that is missing or absurd."""
    architecture = architecture_of(file)
    metadata = Metadata(file)
    heads = metadata.count("attention.head_count", limit=1 << 16)
    hidden = metadata.count("embedding_length")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": _layers(metadata),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads, limit=1 << 16),
        "head_dim": metadata.count("attention.key_length", max(1, hidden // heads), limit=1 << 16),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "max_position_embeddings": metadata.count("context_length", limit=1 << 30),
        "vocab_size": _vocab_size(metadata),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    _add_rope_scaling(metadata, config)
    architecture.complete(metadata, config)
    return config


def _layers(metadata: Metadata) -> int:
    """The number of layers, believed only if the last of them is there."""
    layers = metadata.count("block_count", limit=4096)
    if not any(name.startswith(f"blk.{layers - 1}.") for name in metadata.file.tensors):
        raise metadata.refuse(f"the metadata speaks of {layers} layers, but the last has no tensors")
    return layers


def _vocab_size(metadata: Metadata) -> int:
    embedding = metadata.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise metadata.refuse("tensor token_embd.weight is missing or not a matrix")
    return embedding.shape[0]


def _add_rope_scaling(metadata: Metadata, config: dict[str, Any]) -> None:
    kind = metadata.value("rope.scaling.type", str, "none")
    if kind in ("none", "longrope"):  # longrope's factors are tensors: see the architecture
        return
    if kind not in ("linear", "yarn"):
        raise metadata.refuse(f"rope scaling {kind!r} is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        original = metadata.count("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
    config["rope_scaling"] = scaling
