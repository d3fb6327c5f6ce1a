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
    _refuse_what_changes_the_model(metadata)
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
    _check_head(metadata, config)
    _add_rope_scaling(metadata, config)
    architecture.complete(metadata, config)
    return config


# Settings that change what a model computes and that no mapping here honours, with the value that changes
# nothing. Reading past one would give wrong tokens without a word.
_NEUTRAL: dict[str, object] = {
    "attention.alibi_bias_max": 0.0,
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.scale": 0.0,
    "attention.temperature_scale": 0.0,
    "embedding_scale": 1.0,
    "expert_shared_count": 0,
    "expert_weights_scale": 1.0,
    "interleave_moe_layer_step": 1,
    "leading_dense_block_count": 0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.1,
    "use_parallel_residual": False,
}
_ONLY_FOR = {
    "attn_logit_softcapping": ("gemma2",),
    "final_logit_softcapping": ("gemma2", "gemma3"),
    "rope.scaling.attn_factor": ("phi3",),
}


def _refuse_what_changes_the_model(metadata: Metadata) -> None:
    for key, neutral in _NEUTRAL.items():
        value = metadata.value(key, (bool, int, float, str, list))
        if value is not None and value != neutral:
            raise metadata.refuse(f"metadata {metadata.architecture}.{key} = {value!r:.40} is not supported")
    for key, architectures in _ONLY_FOR.items():
        value = metadata.value(key, (int, float))
        if value not in (None, 0, 1) and metadata.architecture not in architectures:
            raise metadata.refuse(f"metadata {metadata.architecture}.{key} = {value!r:.40} is not supported")


def _check_head(metadata: Metadata, config: dict[str, Any]) -> None:
    """Heads whose keys and values differ in size, or that turn only a part, are not these models'."""
    head_dim = config["head_dim"]
    sizes = {"attention.value_length": head_dim}
    if metadata.architecture != "phi3":
        sizes["rope.dimension_count"] = head_dim
    for key, expected in sizes.items():
        if metadata.count(key, expected) != expected:
            raise metadata.refuse(f"{metadata.architecture}.{key} is not the head's size, {expected}: not supported")
    fixed = ("qwen2", "phi3")  # mlx-lm's models of these take hidden / heads, whatever the file says
    if metadata.architecture in fixed and head_dim * config["num_attention_heads"] != config["hidden_size"]:
        raise metadata.refuse(f"heads of {head_dim} do not make the hidden size {config['hidden_size']}")


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
        for key in ("beta_fast", "beta_slow"):
            if metadata.value(f"rope.scaling.yarn_{key}", (int, float)) is not None:
                scaling[key] = metadata.number(f"rope.scaling.yarn_{key}")
    config["rope_scaling"] = scaling
