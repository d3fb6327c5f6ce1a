"""A tiny configuration for every model file of mlx-lm: a few layers, every kind of layer of the family."""

from __future__ import annotations

import copy
import importlib
import re
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm.models
from family_overrides import OVERRIDES, WRAPPED

VOCAB = 500

# What most families read. A family's own entry below overrides it; keys that a family does not know are ignored.
COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "n_layers": 4,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "head_dim": 16,
    "max_position_embeddings": 1000,
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "n_head": 8,
    "n_embd": 128,
    "n_positions": 512,
    "n_ctx": 512,
    "n_layer": 4,
    "n_inner": 256,
    "rotary_dim": 8,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "logit_scale": 1.0,
    "hidden_act": "silu",
    "kv_channels": 16,
    "no_bias": True,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
    "use_parallel_residual": True,
    "mup_use_scaling": False,
    "mup_attn_multiplier": 1.0,
    "d_model": 128,
    "ffn_config": {
        "ffn_hidden_size": 64,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_jitter_eps": 0.0,
        "moe_loss_weight": 0.1,
        "ffn_act_fn": {"name": "silu"},
    },
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1000.0},
    "n_heads": 8,
    "dense_attention_every_n_layers": 2,
    "ff_intermediate_size": 128,
    "gegelu_limit": 20.0,
    "mup_width_multiplier": 8.0,
    "mup_embedding_multiplier": 10.0,
    "rope_embedding_base": 1000,
    "rope_position_scale": 1.0,
    "blocksparse_block_size": 64,
    "blocksparse_num_local_blocks": 16,
    "blocksparse_vert_stride": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "scale_emb": 1,
    "dim_model_base": 1,
    "scale_depth": 1,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def family_names() -> list[str]:
    """Every file of mlx_lm.models that defines a model, found by its text: some cannot be imported here."""
    folder = Path(mlx_lm.models.__path__[0])
    defines_model = re.compile(r"^(class Model\(|from .* import .*\bModel\b)", re.MULTILINE)
    return sorted(path.stem for path in folder.glob("*.py") if defines_model.search(path.read_text()))


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """The tiny configuration of a family, as its config.json would hold it; `changes` go into the language model's
    part of it."""
    config = {**COMMON, "model_type": name, **OVERRIDES.get(name, {}), **changes}
    if name in WRAPPED:
        inner, extra = WRAPPED[name]
        config["text_config"] = {**COMMON, "model_type": inner, **OVERRIDES.get(inner, {}), **extra, **changes}
    return copy.deepcopy(config)  # some families write into theirs


def build(name: str, **changes: Any) -> nn.Module:
    """A tiny model of a family, with mlx-lm's own random weights. Raises what mlx-lm raises."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    return module.Model(module.ModelArgs.from_dict(config_of(name, **changes)))
