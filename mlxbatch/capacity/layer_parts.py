"""What the readers of config.json share: parts of a decoder layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxbatch.capacity.model_shape import Attention, Experts, Layer, Linear

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a family's reader found: the layers and the parameters beside layers and embeddings."""

    layers: tuple[Layer, ...]
    other: int


def gated_mlp(hidden: int, inner: int, *, bias: bool = False) -> tuple[Linear, ...]:
    return (Linear(hidden, inner, bias), Linear(hidden, inner, bias), Linear(inner, hidden, bias))


def gated_experts(total: int, active: int, hidden: int, inner: int, *, bias: bool = False) -> Experts:
    return Experts(total, active, gated_mlp(hidden, inner, bias=bias))


def head_dim(c: Config) -> int:
    return int(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])


def kv_heads(c: Config) -> int:
    return int(c.get("num_key_value_heads") or c["num_attention_heads"])


def layer_window(c: Config, index: int) -> int | None:
    """The sliding window of a layer, from layer_types or from the family's pattern."""
    types: Sequence[str] | None = c.get("layer_types")
    window = c.get("sliding_window")
    if types is not None and window:
        return int(window) if types[index] == "sliding_attention" else None
    pattern = c.get("sliding_window_pattern")
    if pattern and window:
        return int(window) if (index + 1) % int(pattern) else None
    return None


def attention_block(
    c: Config,
    window: int | None = None,
    *,
    bias: bool = False,
    out_bias: bool | None = None,
    gated: bool = False,
) -> tuple[Attention, tuple[Linear, ...]]:
    hidden, heads, kv, dim = c["hidden_size"], c["num_attention_heads"], kv_heads(c), head_dim(c)
    attention = Attention("full" if window is None else "sliding", heads, kv, dim, dim, window)
    linears = (
        Linear(hidden, heads * dim * (2 if gated else 1), bias),
        Linear(hidden, kv * dim, bias),
        Linear(hidden, kv * dim, bias),
        Linear(heads * dim, hidden, bias if out_bias is None else out_bias),
    )
    return attention, linears


def qk_norms(c: Config, *, per_head: bool = True) -> int:
    dim = head_dim(c)
    return 2 * dim if per_head else (c["num_attention_heads"] + kv_heads(c)) * dim


def sparse_step_dense_layers(c: Config) -> list[int]:
    step = int(c.get("decoder_sparse_step") or 1)
    only: Sequence[int] = c.get("mlp_only_layers") or ()
    return [i for i in range(c["num_hidden_layers"]) if i in only or (i + 1) % step]
