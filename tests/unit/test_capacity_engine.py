"""The capacity model against the engine: KV bytes as allocated, recurrent state, and a real router's choices."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from typing import Any

import mlx.core as mx
import pytest
import tiny_models
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from mlxbatch.capacity.kv_bytes import KVFormat, Workload, kv_bytes
from mlxbatch.capacity.model_families import read_shape
from mlxbatch.execution.model_runner import ModelRunner
from mlxbatch.simulate.machine import group_specs

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "shared_expert_intermediate_size": 48,
    "partial_rotary_factor": 0.5,
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
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 12, "qk_nope_head_dim": 16, "q_lora_rank": None}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "gemma3_text": {"model_type": "gemma3_text", "sliding_window": 32, "sliding_window_pattern": 2},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    "deepseek_v2": {"model_type": "deepseek_v2", "rope_scaling": YARN, **LATENT},  # K and V widths differ
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT},
    "qwen3_next": {"model_type": "qwen3_next", **DELTA},
}


def model_of(config: dict[str, Any]) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.eval()
    return model


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("block_size", [8, 16])
def test_kv_bytes_are_those_that_the_runner_allocates(name: str, block_size: int) -> None:
    config = {**BASE, **CONFIGS[name]}
    shape, fmt = read_shape(config), KVFormat(block_size=block_size, dtype_bytes=4)
    runner = ModelRunner(model_of(config), block_size=block_size)
    predicted = {(g.window, len(g.layers)): g.bytes_per_block for g in group_specs(shape, fmt)}
    assert {(g.window, len(g.layers)): g.bytes_per_block for g in runner.groups} == predicted
    assert runner.kv.bytes_per_token == shape.kv_bytes_per_token(4)

    work = Workload(sequences=6, context=64, chunk=32)
    memory = kv_bytes(shape, work, fmt)
    assert memory.tails == 2 * runner.kv.tail_bytes(8)  # 8 slots hold 6 sequences; old and new at a time
    assert memory.pending == 32 * runner.kv.bytes_per_token
    assert memory.zero_blocks == sum(g.bytes_per_block for g in runner.groups)
    if all(g.window is None for g in runner.groups):
        blocks = 6 * 64 // block_size + 1
        assert memory.pool == runner.kv.pool_bytes([blocks])
        assert memory.growth == runner.kv.growth_bytes_per_block * blocks
        for layer in runner.kv.layers:
            layer.resize_pool(blocks)
        runner.kv.resize_tails(8)
        assert sum(layer.pool_nbytes for layer in runner.kv.layers) == memory.pool
        assert 2 * sum(layer.tail_nbytes for layer in runner.kv.layers) == memory.tails


@pytest.mark.parametrize("name", ["qwen3_next"])
def test_recurrent_state_is_what_mlx_lm_keeps(name: str) -> None:
    config = {**BASE, **CONFIGS[name]}
    model = model_of(config)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3, 4, 5]]), cache=cache))
    kept = sum(a.nbytes for c in cache if isinstance(c, ArraysCache) for a in c.cache if a is not None)
    assert kept == read_shape(config).state_bytes(4)


def test_expected_distinct_experts_against_a_real_router(monkeypatch: Any) -> None:
    """The formula assumes equally likely experts. A router that prefers some touches fewer, never more."""
    from mlx_lm.models.switch_layers import SwitchGLU

    config = {**BASE, "model_type": "mixtral", "num_local_experts": 16, "num_experts_per_tok": 2}
    model = model_of(config)
    tiny_models.randomize(model, 0)
    chosen: list[list[list[int]]] = []  # of each layer: the experts of each token
    original = SwitchGLU.__call__

    def recorded(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        chosen.append(indices.reshape(-1, indices.shape[-1]).tolist())
        return original(self, x, indices)

    monkeypatch.setattr(SwitchGLU, "__call__", recorded)
    numbers = random.Random(3)
    prompt = mx.array([[numbers.randrange(3, 300) for _ in range(64)] for _ in range(16)])
    mx.eval(model(prompt))
    experts = read_shape(config).experts
    assert experts is not None
    for layer in chosen:
        counts = Counter(e for pair in layer for e in pair)
        shares = [counts[e] / len(layer) for e in range(experts.total)]
        assert sum(shares) == pytest.approx(experts.active)
        for tokens in (1, 2, 4, 8, 16):
            groups = [numbers.sample(layer, tokens) for _ in range(400)]
            seen = sum(len({e for pair in group for e in pair}) for group in groups) / len(groups)
            exact = sum(1.0 - (1.0 - share) ** tokens for share in shares)
            assert seen == pytest.approx(exact, rel=0.05)
            assert seen <= experts.distinct(tokens) * 1.02
            assert seen >= experts.distinct(tokens) * 0.75
