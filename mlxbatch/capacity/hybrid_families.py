"""Readers for models with recurrent layers: Mamba2, gated delta nets, short convolutions."""

from __future__ import annotations

from mlxbatch.capacity.layer_parts import (
    Config,
    Reading,
    attention_block,
    gated_experts,
    gated_mlp,
    qk_norms,
    sparse_step_dense_layers,
)
from mlxbatch.capacity.model_shape import Attention, Experts, Layer, Linear


def _mamba2_mixer(
    hidden: int, heads: int, head_dim: int, state: int, groups: int, conv: int, *, bias: bool, conv_bias: bool
) -> tuple[tuple[Linear, ...], int, int, int]:
    """(matrices, other parameters, state elements, float32 state elements) of a Mamba2 mixer."""
    inner = heads * head_dim
    conv_dim = inner + 2 * groups * state
    linears = (Linear(hidden, inner + conv_dim + heads, bias), Linear(inner, hidden, bias))
    other = conv_dim * conv + (conv_dim if conv_bias else 0) + 3 * heads + inner
    return linears, other, (conv - 1) * conv_dim, heads * head_dim * state


def read_granitemoehybrid(c: Config) -> Reading:
    hidden = c["hidden_size"]
    layers = []
    for kind in c["layer_types"]:
        linears: tuple[Linear, ...] = ()
        attention: Attention | None = None
        other, state, state32 = 2 * hidden, 0, 0
        if kind == "mamba":
            linears, more, state, state32 = _mamba2_mixer(
                hidden,
                c["mamba_n_heads"],
                c["mamba_d_head"],
                c["mamba_d_state"],
                c["mamba_n_groups"],
                c["mamba_d_conv"],
                bias=bool(c.get("mamba_proj_bias")),
                conv_bias=bool(c.get("mamba_conv_bias")),
            )
            other += more
        else:
            attention, linears = attention_block(c, bias=bool(c.get("attention_bias", False)))
        experts = None
        if c.get("num_local_experts"):
            experts = gated_experts(c["num_local_experts"], c["num_experts_per_tok"], hidden, c["intermediate_size"])
            linears += (Linear(hidden, experts.total), *gated_mlp(hidden, c["shared_intermediate_size"]))
        else:
            linears += gated_mlp(hidden, c.get("shared_intermediate_size") or c["intermediate_size"])
        layers.append(Layer(attention, linears, experts, other, state, state32))
    return Reading(tuple(layers), hidden)


def read_mamba2(c: Config) -> Reading:
    hidden = c["hidden_size"]
    linears, other, state, state32 = _mamba2_mixer(
        hidden,
        c["num_heads"],
        c["head_dim"],
        c.get("ssm_state_size") or c["state_size"],
        c["n_groups"],
        c["conv_kernel"],
        bias=bool(c.get("use_bias")),
        conv_bias=bool(c.get("use_conv_bias")),
    )
    layer = Layer(None, linears, other=hidden + other, state=state, state_float32=state32)
    return Reading((layer,) * c["num_hidden_layers"], hidden)


def _gated_delta(c: Config, *, fused: bool) -> tuple[tuple[Linear, ...], int, int, int]:
    hidden, key_heads, value_heads = c["hidden_size"], c["linear_num_key_heads"], c["linear_num_value_heads"]
    key, value = c["linear_key_head_dim"] * key_heads, c["linear_value_head_dim"] * value_heads
    conv, conv_dim = c["linear_conv_kernel_dim"], 2 * key + value
    if fused:
        inputs: tuple[Linear, ...] = (Linear(hidden, 2 * key + 2 * value), Linear(hidden, 2 * value_heads))
    else:
        inputs = (Linear(hidden, 2 * key + value), Linear(hidden, value), *(Linear(hidden, value_heads),) * 2)
    other = conv_dim * conv + 2 * value_heads + c["linear_value_head_dim"]
    state32 = value_heads * c["linear_key_head_dim"] * c["linear_value_head_dim"]
    return (*inputs, Linear(value, hidden)), other, (conv - 1) * conv_dim, state32


def read_qwen3_next(c: Config, *, fused: bool = True) -> Reading:
    hidden, interval = c["hidden_size"], c.get("full_attention_interval", 4)
    dense = sparse_step_dense_layers(c) if c.get("num_experts") else range(c["num_hidden_layers"])
    layers = []
    for index in range(c["num_hidden_layers"]):
        attention: Attention | None = None
        other, state, state32 = 2 * hidden, 0, 0
        if (index + 1) % interval:
            linears, more, state, state32 = _gated_delta(c, fused=fused)
            other += more
        else:
            attention, linears = attention_block(c, bias=bool(c.get("attention_bias", False)), gated=True)
            other += qk_norms(c)
        experts = None
        if index in dense:
            linears += gated_mlp(hidden, c["intermediate_size"])
        else:
            experts = gated_experts(c["num_experts"], c["num_experts_per_tok"], hidden, c["moe_intermediate_size"])
            shared = gated_mlp(hidden, c["shared_expert_intermediate_size"])
            linears += (Linear(hidden, experts.total), *shared, Linear(hidden, 1))
        layers.append(Layer(attention, linears, experts, other, state, state32))
    return Reading(tuple(layers), hidden)


def read_qwen3_5(c: Config) -> Reading:
    return read_qwen3_next(c, fused=False)


def read_lfm2(c: Config) -> Reading:
    hidden, inner = c["hidden_size"], c.get("block_ff_dim") or c["intermediate_size"]
    if c.get("block_auto_adjust_ff_dim"):
        inner = int(2 * inner / 3)
        if c.get("block_ffn_dim_multiplier") is not None:
            inner = int(c["block_ffn_dim_multiplier"] * inner)
        multiple = c["block_multiple_of"]
        inner = multiple * -(-inner // multiple)
    return _short_convolutions(c, gated_mlp(hidden, inner), None)


def read_lfm2_moe(c: Config) -> Reading:
    hidden = c["hidden_size"]
    experts = gated_experts(c["num_experts"], c["num_experts_per_tok"], hidden, c["moe_intermediate_size"])
    return _short_convolutions(c, gated_mlp(hidden, c["intermediate_size"]), experts)


def _short_convolutions(c: Config, mlp: tuple[Linear, ...], experts: Experts | None) -> Reading:
    """Attention and short convolutions in turns. With experts, the first num_dense_layers keep the plain MLP."""
    hidden = c["hidden_size"]
    full = c.get("full_attn_idxs")
    if full is None:
        full = [i for i, kind in enumerate(c["layer_types"]) if kind == "full_attention"]
    layers = []
    for index in range(c["num_hidden_layers"]):
        attention: Attention | None = None
        other, state = 2 * hidden, 0
        if index in full:
            attention, linears = attention_block(c)
            other += qk_norms(c)
        else:
            bias, cache = bool(c.get("conv_bias")), c["conv_L_cache"]
            linears = (Linear(hidden, 3 * hidden, bias), Linear(hidden, hidden, bias))
            other += hidden * cache + (hidden if bias else 0)
            state = (cache - 1) * hidden
        if experts is None or index < c.get("num_dense_layers", 0):
            layers.append(Layer(attention, linears + mlp, other=other, state=state))
        else:
            other += experts.total if c.get("use_expert_bias") else 0
            layers.append(Layer(attention, (*linears, Linear(hidden, experts.total)), experts, other, state))
    return Reading(tuple(layers), hidden)
