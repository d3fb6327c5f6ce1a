"""Tiny configurations of model families by how they attend, for parity with mlx-lm. All random weights."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.nn as nn
import tiny_models

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
    "sliding_window": 8,
}

_MLA: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
}

_GATED_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 3,
    "full_attention_interval": 2,
}

# What each covers is in its comment; keys are mlx-lm's module names.
CONFIGS: dict[str, dict[str, Any]] = {
    # K and V shared between layers, windows
    "gemma3n": {
        "text_config": {
            **_COMMON,
            "model_type": "gemma3n",
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 512,
            "rope_local_base_freq": 1000.0,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "activation_sparsity_pattern": [0.5, 0.0] * 3,
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 2,
            "altup_coef_clip": 10.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
            "final_logit_softcapping": 30.0,
        }
    },
    # absorbed latent attention
    "deepseek_v3": _MLA,
    # sinks, windows, mixture of experts
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": False},
    # K and V of different width, sinks in window layers, other head counts there
    "mimo_v2_flash": {
        **_MLA,
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 8,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "swa_v_head_dim": 12,
        "v_head_dim": 12,
    },
    # gated delta net beside attention
    "qwen3_next": {
        **_GATED_DELTA,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
    },
    # short convolutions beside attention
    "lfm2": {
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 128,
        "full_attn_idxs": [1, 3],
    },
    # state space and attention in one layer (CacheList)
    "falcon_h1": {},
    # no attention at all
    "mamba2": {
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.001, 100.0),
        "time_step_rank": "auto",
        "intermediate_size": 64,
    },
    # linear recurrence and attention within a window
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
        "num_key_value_heads": 1,
    },
    # attends by hand: not covered
    "gemma2": {
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}


def build(name: str, seed: int = 0) -> nn.Module:
    """A tiny random model of one family, in eval mode."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict({**_COMMON, "model_type": name, **CONFIGS[name]}))
    tiny_models.randomize(model, seed)
    model.eval()
    return model
