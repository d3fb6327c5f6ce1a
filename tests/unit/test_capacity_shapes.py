"""Shapes read from a config.json: parameters against mlx-lm's own models, and published totals."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from mlxbatch.capacity.known_models import find_known, find_shape, known_models
from mlxbatch.capacity.model_families import read_shape
from mlxbatch.capacity.model_shape import Quantization
from mlxbatch.errors import ModelError

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "head_dim": 16,
}
MOE = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
ROUTED = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16}
GRANITE = {
    "logits_scaling": 1.0,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_bias": False,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
YARN = {
    "type": "yarn",
    "factor": 2,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-biases-tied": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "phi3": {"model_type": "phi3"},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 4},
    "granite": {"model_type": "granite", "mlp_bias": False, **GRANITE},
    "olmo2": {"model_type": "olmo2"},
    "glm4": {"model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5},
    "gemma2": {
        "model_type": "gemma2",
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "query_pre_attn_scalar": 16,
    },
    "cohere2": {
        "model_type": "cohere2",
        "logit_scale": 0.1,
        "layer_norm_eps": 1e-5,
        "sliding_window": 32,
        "attention_bias": False,
        "layer_norm_bias": False,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": {"model_type": "granitemoe", "num_local_experts": 8, "num_experts_per_tok": 2, **GRANITE},
    "olmoe": {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 48, **MOE},
    "qwen3_moe": {"model_type": "qwen3_moe", **MOE, "decoder_sparse_step": 2},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        **ROUTED,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        "q_lora_rank": 24,
        "rope_scaling": YARN,
        **LATENT,
        **ROUTED,
    },
    "deepseek_v3": {"model_type": "deepseek_v3", "q_lora_rank": 24, **LATENT, **ROUTED},
    "deepseek_v3-dense": {"model_type": "deepseek_v3", "q_lora_rank": None, **LATENT},
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "tie_word_embeddings": True,
        **GRANITE,
        **MAMBA,
    },
    "mamba2": {
        "model_type": "mamba2",
        "num_heads": 8,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0, 1],
        "time_step_rank": "auto",
        "intermediate_size": 128,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "shared_expert_intermediate_size": 48,
        "partial_rotary_factor": 0.5,
        **MOE,
        **DELTA,
    },
    "lfm2": {
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 96,
        "full_attn_idxs": [1],
        "tie_word_embeddings": True,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "norm_eps": 1e-5,
        "conv_bias": True,
        "conv_L_cache": 3,
        "num_dense_layers": 1,
        "use_expert_bias": True,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "tie_word_embeddings": True,
        **MOE,
    },
}


def count_parameters(config: dict[str, Any]) -> int:
    """Parameters of mlx-lm's own model, built lazily: nothing is computed."""
    from mlx.utils import tree_flatten

    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    return sum(array.size for _, array in tree_flatten(model.parameters()))


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_equal_those_of_mlx_lm(name: str) -> None:
    config = {**BASE, **CONFIGS[name]}
    shape = read_shape(config)
    assert not shape.approximate
    assert shape.params == count_parameters(config)


def test_gemma3_shares_the_table_that_mlx_lm_only_drops_on_loading() -> None:
    config = {**BASE, "model_type": "gemma3_text", "sliding_window": 32, "sliding_window_pattern": 2}
    shape = read_shape(config)
    assert shape.params == count_parameters(config) - 300 * 64
    assert (shape.count("full"), shape.count("sliding")) == (2, 2)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("mixtral-8x7b", 46_702_792_704),
        ("gemma-3-1b", 999_885_952),
        ("gpt-oss-20b", 20_914_757_184),
        ("deepseek-v3", 671_026_419_200),
        ("smollm2-135m", 134_515_008),
        ("lfm2-8b-a1b", 8_339_929_856 + 22 * 32),  # and the biases of its routers
    ],
)
def test_known_models_have_their_published_size(name: str, params: int) -> None:
    assert find_shape(name).params == params


def test_every_known_model_is_read_by_its_own_family() -> None:
    for name in known_models():
        assert not find_shape(name).approximate, name


def test_active_parameters_of_a_mixture_leave_the_idle_experts_out() -> None:
    shape = find_shape("mixtral-8x7b")
    idle = 32 * 6 * 3 * 4096 * 14336
    assert shape.active_params == shape.params - idle - 32000 * 4096
    assert find_shape("llama-3.1-8b").experts is None


def test_kv_elements_by_kind_of_layer() -> None:
    assert find_shape("llama-3.1-8b").kv_bytes_per_token() == 2 * 32 * 8 * 128 * 2
    latent = find_shape("deepseek-v3")
    assert latent.count("latent") == 61
    assert latent.kv_bytes_per_token() == 61 * (512 + 64) * 2
    expanded = read_shape({**BASE, **CONFIGS["deepseek_v2"]})  # mlx-lm caches K of 24 and V of 16 a head
    assert expanded.kv_bytes_per_token() == 4 * 4 * (24 + 16) * 2
    hybrid = find_shape("qwen3-next-80b-a3b")
    assert (hybrid.count("full"), hybrid.count("recurrent")) == (12, 36)
    conv, state = 3 * (2 * 16 * 128 + 32 * 128), 32 * 128 * 128
    assert hybrid.state_bytes() == 36 * (conv * 2 + state * 4)


def test_quantised_bytes_count_scales_and_biases() -> None:
    shape = find_shape("llama-3.1-8b")
    assert shape.weight_bytes(None) == 16_060_522_496
    rest = shape.params - shape.matrix_weights
    assert shape.weight_bytes(Quantization(4, 64)) == shape.matrix_weights * 9 // 16 + rest * 2
    assert Quantization(4, 32, "mxfp4").bits_per_weight == 4.25


@pytest.mark.parametrize(
    "name",
    [
        "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
        "meta-llama/Llama-3.1-8B-Instruct",
        "Llama-3.1-8B",
        "mlx-community/Meta-Llama-3.1-8B-Instruct-8bit",
    ],
)
def test_repositories_are_found_under_their_own_name(name: str) -> None:
    assert find_known(name) is known_models()["llama-3.1-8b"]


def test_bits_in_the_name_are_the_quantisation() -> None:
    shape = find_shape("mlx-community/Qwen3-8B-4bit")
    assert shape.quantization == Quantization(4, 64)
    assert find_shape("qwen3-8b").quantization is None


def test_an_unknown_family_is_read_as_llama_and_says_so() -> None:
    shape = read_shape({**BASE, "model_type": "brand_new"})
    assert shape.approximate
    with pytest.raises(ModelError, match=r"brand_new.*read as llama"):
        read_shape({"model_type": "brand_new", "vocab_size": 3})


def test_a_config_file_is_read_and_named_after_its_folder(tmp_path: Any) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    config = {**BASE, "model_type": "llama", "quantization": {"bits": 4, "group_size": 32}}
    (folder / "config.json").write_text(json.dumps(config))
    for given in (folder, folder / "config.json"):
        shape = find_shape(str(given))
        assert (shape.name, shape.quantization) == ("my-model", Quantization(4, 32))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        find_shape(str(folder))
    with pytest.raises(ModelError, match="no shape is known"):
        find_shape("nobody-has-this")


def test_text_models_inside_a_multimodal_config() -> None:
    inner = {**BASE, "model_type": "gemma3_text", "sliding_window": 32}
    shape = read_shape({"model_type": "gemma3", "text_config": inner})
    assert shape.model_type == "gemma3_text"
    assert not shape.approximate
