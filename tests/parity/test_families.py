"""Every model family of the installed mlx-lm: the committed table says how it runs, and it runs that way."""

from __future__ import annotations

import mlx.core as mx
import pytest
from families import TOLERANCE, check_family, check_model, profile_family, tiny_model
from mlx_lm_families import build, family_names
from support_table import REFUSED, Row, described, measured, read_table

from mlxbatch.errors import ModelError
from mlxbatch.execution.modes import profile_model
from mlxbatch.models.model_class import model_classes
from mlxbatch.models.support import REFUSED as REASONS

TABLE = read_table()
# One family of every mode, attention kind and adapter; `make test-all` measures all of them.
EVERY_KIND = (
    "afm7",  # keys of one layer shared by several, adapter
    "baichuan_m1",  # windows and state in one layer
    "deepseek_v3",  # latent
    "deepseek_v32",  # keys found by an index, adapter
    "gear",  # soft cap, window and state, adapter
    "gemma2",  # soft cap, adapter
    "gemma3n",  # shared keys, windows
    "gpt_oss",  # sinks, windows, experts
    "kimi_linear",  # latent beside state
    "llama",
    "llama4",  # chunks of positions, adapter
    "longcat_flash_ngram",  # state of token ids, adapter
    "mamba2",  # state alone
    "minimax_m3_vl",  # blocks of keys found by an index, adapter
    "mimo_v2_flash",  # K and V of different widths
    "plamo",  # interleaved KV heads, adapter
    "qwen3_next",  # gated delta rule
)


# What the tiny configuration of a family leaves out, or reaches at once.
VARIANTS = {
    "all within the first chunk": ("llama4", {"attention_chunk_size": 64}),
    "beyond the first chunk in time": ("llama4", {"attention_chunk_size": 16}),
    "fewer keys than the index finds": ("deepseek_v32", {"index_topk": 64}),
    "more keys than the index finds in time": ("deepseek_v32", {"index_topk": 16}),
    "fewer blocks than the index finds": ("minimax_m3_vl", {"index_topk_blocks": 16}),
    "more blocks than the index finds in time": ("minimax_m3_vl", {"index_topk_blocks": 4}),
    "no soft cap": ("gear", {"attn_logit_softcapping": None}),
    "one KV head": ("llama", {"num_key_value_heads": 1}),
    "a KV head for each query head": ("llama", {"num_key_value_heads": 8, "layer_types": ["full_attention"] * 4}),
    "rope scaled as llama 3": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "rope scaled by yarn": (
        "qwen3",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "rope with short and long factors": (
        "phi3",
        {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [1.0, 2.0, 3.0, 4.0],
                "original_max_position_embeddings": 16,
            }
        },
    ),
}


def test_the_table_names_what_is_installed():
    assert sorted(TABLE) == family_names(), "run: python tests/parity/support_table.py --write"


def test_enough_families_run():
    assert sum(row.mode != REFUSED for row in TABLE.values()) >= 95


@pytest.mark.parametrize("name", EVERY_KIND)
def test_logits_equal_mlx_lm(name):
    parity = check_family(name)
    assert parity.holds, parity
    assert (parity.mode, ", ".join(parity.kinds)) == (TABLE[name].mode, TABLE[name].detail)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_a_family_equal_mlx_lm(variant):
    name, changes = VARIANTS[variant]
    parity = check_model(tiny_model(name, **changes))
    assert parity.holds, parity


@pytest.mark.parametrize("name", sorted(TABLE))
def test_the_table_says_how_a_family_runs(name):
    try:
        mode, kinds = profile_family(name)
    except ModelError as error:
        mode, detail = REFUSED, str(error).partition(": ")[2]
    else:
        detail = described(name, kinds)
    if TABLE[name].error:
        assert float(TABLE[name].error) <= TOLERANCE
    assert Row(name, mode, detail, TABLE[name].error) == TABLE[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TABLE))
def test_all_logits_equal_mlx_lm(name):
    row = measured(name)
    assert (row.mode, row.detail) == (TABLE[name].mode, TABLE[name].detail)


@pytest.mark.parametrize("name", sorted(REASONS))
def test_a_refused_family_is_named_with_its_reason(name):
    with pytest.raises(ModelError, match=f"models of type {name}: ") as caught:
        model_classes({"model_type": name})
    assert REASONS[name] in str(caught.value)


@pytest.mark.parametrize("name", ["deepseek_v41"])
def test_what_is_refused_by_name_would_be_refused_by_what_it_does(name):
    with pytest.raises(ModelError, match=f"cannot run models of type {name}"):
        profile_model(build(name), 4)


def test_a_family_without_its_adapter_is_refused():
    """Not run with wrong positions: this one reads the context's length from its keys."""
    mx.random.seed(0)
    with pytest.raises(ModelError, match="length of the context"):
        profile_model(build("afm7"), 4)
