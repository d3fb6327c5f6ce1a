"""Every model family of the installed mlx-lm: the committed table says how it runs, and it runs that way."""

from __future__ import annotations

import mlx.core as mx
import pytest
from families import TOLERANCE, check_family, profile_family
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
    "gear",  # soft cap, window and state, adapter
    "gemma2",  # soft cap, adapter
    "gemma3n",  # shared keys, windows
    "gpt_oss",  # sinks, windows, experts
    "kimi_linear",  # latent beside state
    "llama",
    "llama4",  # chunks of positions, adapter
    "longcat_flash_ngram",  # state of token ids, adapter
    "mamba2",  # state alone
    "mimo_v2_flash",  # K and V of different widths
    "plamo",  # interleaved KV heads, adapter
    "qwen3_next",  # gated delta rule
)


def test_the_table_names_what_is_installed():
    assert sorted(TABLE) == family_names(), "run: python tests/parity/support_table.py --write"


def test_enough_families_run():
    assert sum(row.mode != REFUSED for row in TABLE.values()) >= 95


@pytest.mark.parametrize("name", EVERY_KIND)
def test_logits_equal_mlx_lm(name):
    parity = check_family(name)
    assert parity.holds, parity
    assert (parity.mode, ", ".join(parity.kinds)) == (TABLE[name].mode, TABLE[name].detail)


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


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v41", "glm_moe_dsa", "minimax_m3_vl"])
def test_what_is_refused_by_name_would_be_refused_by_what_it_does(name):
    with pytest.raises(ModelError, match=f"cannot run models of type {name}"):
        profile_model(build(name), 4)


def test_a_family_without_its_adapter_is_refused():
    """Not run with wrong positions: this one reads the context's length from its keys."""
    mx.random.seed(0)
    with pytest.raises(ModelError, match="length of the context"):
        profile_model(build("afm7"), 4)
