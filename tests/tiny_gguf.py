"""Writing tiny models as GGUF files in the way of llama.cpp's converter, so that reading them can be checked.

Written from the converter's side: weights and row order go in as it puts them, whatever the reader does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import tiny_models
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType
from gguf.quants import quantize
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.switch_mlp.gate_proj": "ffn_gate_exps",
    "mlp.switch_mlp.up_proj": "ffn_up_exps",
    "mlp.switch_mlp.down_proj": "ffn_down_exps",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.switch_mlp.gate_proj": "ffn_gate_exps",
    "block_sparse_moe.switch_mlp.up_proj": "ffn_up_exps",
    "block_sparse_moe.switch_mlp.down_proj": "ffn_down_exps",
}

# Configurations on top of tiny_models', and the GGUF architecture that the converter gives each.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"model_type": "llama", "tie_word_embeddings": True}),
    "llama_rope3": (
        "llama",
        {
            "model_type": "llama",
            "tie_word_embeddings": False,
            "rope_theta": 500000.0,
            "head_dim": 32,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "mistral": ("llama", {"model_type": "mistral", "tie_word_embeddings": False, "num_key_value_heads": 1}),
    "mixtral": (
        "llama",
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    ),
    "qwen2": ("qwen2", {"model_type": "qwen2", "tie_word_embeddings": True}),
    "qwen2_yarn": (
        "qwen2",
        {
            "model_type": "qwen2", "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        },
    ),
    "qwen3": ("qwen3", {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 32}),
    "qwen3_moe": (
        "qwen3moe",
        {
            "model_type": "qwen3_moe", "tie_word_embeddings": False, "head_dim": 32, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
    ),
    "gemma2": (
        "gemma2",
        {
            "model_type": "gemma2", "head_dim": 32, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "sliding_window": 4096,
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "model_type": "gemma3_text", "head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 6,
            "sliding_window": 32, "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0,
            "rope_theta": 1000000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "phi3": ("phi3", {"model_type": "phi3", "tie_word_embeddings": False, "num_key_value_heads": 4}),
    "phi3_long": (
        "phi3",
        {
            "model_type": "phi3", "tie_word_embeddings": False, "max_position_embeddings": 2048,
            "original_max_position_embeddings": 512,
            "rope_scaling": {
                "type": "longrope", "original_max_position_embeddings": 512,
                "long_factor": [1.0 + i / 4 for i in range(8)], "short_factor": [1.0] * 8,
            },
        },
    ),
    "smollm3": ("smollm3", {"model_type": "smollm3", "tie_word_embeddings": True, "num_hidden_layers": 4}),
}  # fmt: skip


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return {**tiny_models.config_of("llama"), **FAMILIES[family][1], **changes}


def build(config: dict[str, Any], seed: int = 0) -> nn.Module:
    """A random float32 model for a configuration."""
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    tiny_models.randomize(model, seed)
    if config["model_type"].startswith("gemma"):  # embeddings are scaled up, and would drown the layers
        model.model.embed_tokens.weight = model.model.embed_tokens.weight / config["hidden_size"] ** 0.5
    if config["model_type"] == "gemma3_text":  # its files have no output layer of their own
        weights = dict(tree_flatten(model.parameters()))
        weights.pop("lm_head.weight", None)
        model.load_weights(list(model.sanitize(weights).items()), strict=True)
    model.eval()
    return model


def write(
    path: Path,
    family: str,
    model: nn.Module,
    config: dict[str, Any],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model. Matrices are stored as `kind`, vectors and routers as F32."""
    architecture = FAMILIES[family][0]
    writer = GGUFWriter(str(path), architecture)
    _write_parameters(writer, architecture, config)
    write_tokenizer(writer)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, *value)
    for name, array in tree_flatten(model.parameters()):
        target = _tensor_name(name, config)
        values = _in_file_order(np.array(array.astype(mx.float32)), name, architecture, config)
        plain = values.ndim == 1 or "gate_inp" in target
        stored = GGMLQuantizationType.F32 if plain else kind
        writer.add_tensor(target, quantize(values, stored), raw_dtype=stored)
    for name, values in _extra_tensors(config).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_parameters(writer: GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    if architecture in ("llama", "phi3", "smollm3"):
        writer.add_rope_dimension_count(head_dim)
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(config["sliding_window"])
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if architecture == "phi3":
        original = config.get("original_max_position_embeddings", config["max_position_embeddings"])
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_sliding_window(0)
        if scaling:
            ratio = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(ratio) / np.log(original))))


def write_tokenizer(writer: GGUFWriter, pre: str = "gpt-2") -> None:
    """tiny_models' tokenizer, as the converter writes a byte-level one."""
    parts = json.loads(tiny_models.tokenizer_json())
    vocabulary: dict[str, int] = parts["model"]["vocab"]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    special = set(tiny_models.SPECIAL_TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in parts["model"]["merges"]])
    writer.add_bos_token_id(vocabulary["<|im_start|>"])
    writer.add_eos_token_id(vocabulary[tiny_models.EOS_TOKEN])
    writer.add_add_bos_token(False)
    writer.add_chat_template(tiny_models.CHAT_TEMPLATE)


def _tensor_name(name: str, config: dict[str, Any]) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, _, leaf = name.rpartition(".")
    if module in top:
        return f"{top[module]}.{leaf}"
    layer, _, module = module.removeprefix("model.layers.").partition(".")
    norms = GEMMA_NORMS if config["model_type"].startswith("gemma") else NORMS
    return f"blk.{layer}.{(norms | MODULES)[module]}.{leaf}"


def _in_file_order(values: np.ndarray, name: str, architecture: str, config: dict[str, Any]) -> np.ndarray:
    if architecture.startswith("gemma") and "norm" in name:
        return values + np.float32(1)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if architecture in ("llama", "smollm3") and heads:
        # The two halves of each head, interleaved: rows 0, h, 1, h + 1, ...
        split = values.reshape(config[heads], 2, -1, *values.shape[1:])
        return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)
    return values


def _extra_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    scaling = config.get("rope_scaling") or {}
    if scaling.get("type") == "longrope":
        return {
            f"rope_factors_{which}.weight": np.array(scaling[f"{which}_factor"], dtype=np.float32)
            for which in ("long", "short")
        }
    if scaling.get("rope_type") != "llama3":
        return {}
    dims = config["head_dim"]
    factors = []
    for index in range(0, dims, 2):
        wavelength = 2 * np.pi * config["rope_theta"] ** (index / dims)
        low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
        high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(scaling["factor"])
        else:
            turns = scaling["original_max_position_embeddings"] / wavelength
            smooth = (turns - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return {"rope_freqs.weight": np.array(factors, dtype=np.float32)}
