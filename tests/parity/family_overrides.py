"""What families need beside the common tiny configuration. Every text or vision part is given in full: the
defaults of some are the sizes of the released models, many GB."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_MAMBA2: Config = {
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "conv_kernel": 4,
    "n_groups": 2,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": (0.001, 100.0),
    "time_step_rank": "auto",
    "intermediate_size": 128,
}
_GATED_DELTA: Config = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 3,
    "full_attention_interval": 2,
}
_QWEN3_5: Config = {
    **_GATED_DELTA,
    "rope_parameters": {
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "type": "default",
        "mrope_section": [2, 1, 1],
    },
}
_LFM2: Config = {
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 128,
    "block_ff_dim": 256,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": [1, 3],
    "layer_types": None,
}
_KIMI_LINEAR: Config = {
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 1000,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "q_lora_rank": None,
}
_LIGHTNING: Config = {"num_shared_experts": 1, "layer_group_size": 2, "group_norm_size": 1}
_GRANITE: Config = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
}
_LONGCAT: Config = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 128,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 64,
    "zero_expert_num": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_YARN: Config = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LLAMA4_SCALED: Config = {
    **_YARN,
    "rope_theta": 1000.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 8,
}
_INDEXED: Config = {"index_head_dim": 16, "index_n_heads": 16, "index_topk": 6, "topk_method": "noaux_tc"}
_BY_LAYER_KIND: Config = {
    "sliding_attention": {"rope_theta": 1000.0, "rope_type": "default"},
    "full_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}

OVERRIDES: dict[str, Config] = {
    "Klear": {"mlp_only_layers": [0], "decoder_sparse_step": 1},
    "afm7": {"hidden_dim": 128, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 8, "num_kv_heads": 2},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2, "tie_word_embeddings": False},
    "bailing_hybrid": {**_LIGHTNING},
    "bailing_moe": {"num_shared_experts": 1, "topk_group": 1},
    "bailing_moe_linear": {**_LIGHTNING, "topk_group": 1},
    "bailing_moe_v3": {"layer_group_size": 2, "moe_shared_expert_intermediate_size": 64, "num_experts_per_tok": 2},
    "deepseek_v2": {"rope_scaling": _YARN, "q_lora_rank": 16},
    "deepseek_v32": {**_INDEXED},
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": {"use_bias": False, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "exaone": {"num_layers": 4},
    "exaone4": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "sliding_window_pattern": "LG",
    },
    "exaone_moe": {"num_shared_experts": 1, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
    },
    "gear": {
        "layer_types": ["conv_mixer", "sliding_attention", "full_attention", "conv_mixer"],
        "query_pre_attn_scalar": 16,
    },
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {
        **_INDEXED,
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
    },
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoehybrid": {
        **_GRANITE,
        "layer_types": ["mamba", "attention"] * 2,
        "shared_intermediate_size": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 2,
        "mamba_conv_bias": True,
    },
    "hunyuan": {
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "iquestloopcoder": {"loop_window_size": 8},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "kimi_linear": _KIMI_LINEAR,
    "lfm2": _LFM2,
    "lfm2_moe": {**_LFM2, "use_expert_bias": True, "num_dense_layers": 1},
    "lille-130m": {"block_size": 1000, "n_kv_heads": 2},
    "llama4_text": {"intermediate_size_mlp": 256, "no_rope_layers": [1, 0, 1, 0]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 2},
    "mamba": {"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 8},
    "mamba2": _MAMBA2,
    "mellum": {"rope_parameters": _BY_LAYER_KIND},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 8,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "swa_v_head_dim": 12,
        "v_head_dim": 12,
    },
    "minicpm3": {
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 2.0, 3.0, 4.0],
        }
    },
    "minimax": {"shared_intermediate_size": 64},
    "ministral3": {"rope_parameters": _LLAMA4_SCALED},
    "mistral4": {"rope_parameters": _LLAMA4_SCALED},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 2.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"replace_with_linear": True}},
        ]
    },
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "*", "E", "M", "*", "-"],
        "layer_types": None,
        "moe_shared_expert_intermediate_size": 64,
    },
    "olmo": {"mlp_hidden_size": 256, "embedding_size": 512, "vocab_size": 500},
    "olmo_hybrid": {
        **_GATED_DELTA,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "openelm": {
        "num_transformer_layers": 3,
        "model_dim": 128,
        "ffn_dim_divisor": 32,
        "num_query_heads": [4, 8, 8],
        "num_kv_heads": [2, 2, 4],
        "ffn_multipliers": [1.0, 2.0, 2.0],
    },
    "phi3small": {"vocab_size": 100352},  # it silences dummy tokens by number
    "phixtral": {"num_vocab": 500, "model_dim": 128, "num_heads": 8, "num_layers": 3, "rotary_dim": 8},
    "plamo2": {
        "hidden_size_per_head": 16,
        "mamba_num_heads": 8,
        "mamba_d_state": 16,
        "attention_window_size": 8,
        "full_attention_idx": [3],
    },
    "plamo": {"n_shared_head": 4},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "qwen3_next": {
        **_GATED_DELTA,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [0],
    },
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
        "num_key_value_heads": 1,
    },
    "rwkv7": {
        "head_dim": 32,
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
    "spark2_5": {"hidden_act": "gelu", "rope_parameters": _BY_LAYER_KIND},
    "stablelm": {"use_qkv_bias": True},
    "step3p5": {
        "num_attention_groups": 2,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 64,
        "moe_layers_enum": "1,2,3",
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
    },
}

_PACKED_MODULES = [f"model.layers.{i}.mlp.{name}" for i in range(4) for name in ("up_proj", "down_proj")]
OVERRIDES["prism_hadamard_qwen35"] = {
    "tensor_namespace": "mlx-vlm-qwen3_5",
    "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
    "modules": [
        {"path": path, "embedding": False, "dtype": "float16", "block": 512 if "down" in path else 0}
        for path in _PACKED_MODULES
    ],
}

# Families that wrap a language model of another family: (that family, its own keys on top).
WRAPPED: dict[str, tuple[str, Config]] = {
    "gemma3": ("gemma3_text", {}),
    "gemma3n": (
        "gemma3n",
        {
            "num_kv_shared_layers": 2,
            "num_hidden_layers": 6,
            "vocab_size_per_layer_input": 500,
            "rope_local_base_freq": 1000.0,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "activation_sparsity_pattern": [0.5, 0.0] * 3,
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 2,
            "altup_coef_clip": 10.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        },
    ),
    "gemma4": ("gemma4_text", {}),
    "kimi_k25": ("deepseek_v3", {}),
    "kimi_k3": (
        "kimi_linear",
        {
            "hidden_act": "situ",
            "activation_situ_beta": 1.0,
            "activation_situ_linear_beta": 1.0,
            "attn_res_block_size": 2,
            "q_lora_rank": 16,
            "mla_use_output_gate": True,
            "routed_expert_hidden_size": 64,
            "latent_moe_use_norm": True,
        },
    ),
    "kimi_vl": ("deepseek_v3", {}),
    "lfm2-vl": ("lfm2", {}),
    "llama4": (
        "llama4",
        {
            "attention_chunk_size": 8,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 256,
            "rope_scaling": None,
            "floor_scale": 8,
            "num_experts_per_tok": 1,
        },
    ),
    "minimax_m3_vl": (
        "minimax_m3_vl",
        {
            "dense_intermediate_size": 128,
            "shared_intermediate_size": 64,
            "rotary_dim": None,
            "intermediate_size": 64,
            "layer_types": ["full_attention", "sparse", "full_attention", "sparse"],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 4,
            "index_topk_blocks": 2,
        },
    ),
    "mistral3": ("ministral3", {}),
    "muse_spark": (
        "muse_spark",
        {
            "post_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
            "layer_rope_theta": [1000.0, 10000.0] * 2,
            "output_multiplier": 0.5,
            "moe_hidden_size": 64,
        },
    ),
    "pixtral": ("llama", {}),
    "prism_hadamard_qwen35": ("qwen3_5", {**_QWEN3_5, "num_experts": 0, "intermediate_size": 512}),
    "qwen2_vl": ("qwen2", {}),
    "qwen3_5": ("qwen3_5", {**_QWEN3_5, "num_experts": 0}),
    "qwen3_5_moe": ("qwen3_5", {**_QWEN3_5, "shared_expert_intermediate_size": 64}),
    "qwen3_vl": ("qwen3", {}),
    "qwen3_vl_moe": ("qwen3_moe", {}),
}
OVERRIDES["gemma4_text"] = {
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "vocab_size_per_layer_input": 500,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "enable_moe_block": True,
    "top_k_experts": 2,
}
OVERRIDES["deepseek_v41"] = {
    "head_dim": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "num_key_value_heads": 1,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 6,
    "hc_mult": 2,
    "compress_ratios": (0, 4, 0, 4),
}
