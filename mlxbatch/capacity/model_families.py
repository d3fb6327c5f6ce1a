"""From a config.json to a ModelShape, for the families that mlx-lm runs.

Every reader mirrors the constructor of mlx-lm's model file of the same name; a test builds those models
lazily and compares the number of parameters. An unknown model_type is read as llama and marked approximate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mlxbatch.capacity.hybrid_families import (
    read_granitemoehybrid,
    read_lfm2,
    read_lfm2_moe,
    read_mamba2,
    read_qwen3_5,
    read_qwen3_next,
)
from mlxbatch.capacity.layer_parts import (
    Config,
    Reading,
    attention_block,
    gated_experts,
    gated_mlp,
    layer_window,
    qk_norms,
    sparse_step_dense_layers,
)
from mlxbatch.capacity.model_shape import Attention, Experts, Layer, Linear, ModelShape, Quantization
from mlxbatch.errors import ModelError


def _dense(
    c: Config,
    *,
    norms: int = 2,
    qk_norms: int = 0,
    bias: bool | None = None,
    out_bias: bool | None = None,
    mlp_bias: bool = False,
    windows: bool = True,
) -> Reading:
    hidden = c["hidden_size"]
    layers = []
    for index in range(c["num_hidden_layers"]):
        attention, linears = attention_block(
            c,
            layer_window(c, index) if windows else None,
            bias=bool(c.get("attention_bias", False)) if bias is None else bias,
            out_bias=out_bias,
        )
        mlp = gated_mlp(hidden, c["intermediate_size"], bias=mlp_bias)
        layers.append(Layer(attention, linears + mlp, other=norms * hidden + qk_norms))
    return Reading(tuple(layers), hidden)


def _llama(c: Config) -> Reading:
    return _dense(c, mlp_bias=bool(c.get("mlp_bias", False)))


def _qwen2(c: Config) -> Reading:
    return _dense(c, bias=True, out_bias=False, windows=False)


def _qwen3(c: Config) -> Reading:
    return _dense(c, bias=False, qk_norms=qk_norms(c), windows=False)


def _phi3(c: Config) -> Reading:
    return _dense(c, bias=False, windows=False)


def _gemma2(c: Config) -> Reading:
    # mlx-lm gives every gemma2 layer the whole context
    return _dense(c, norms=4, bias=False, windows=False)


def _gemma3(c: Config) -> Reading:
    defaults = {
        "head_dim": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    }
    merged = {**defaults, **{k: v for k, v in c.items() if v is not None and k != "layer_types"}}
    return _dense(merged, norms=4, bias=False, qk_norms=qk_norms(merged))


def _cohere2(c: Config) -> Reading:
    return _dense(
        {
            "sliding_window_pattern": 4,
            "sliding_window": 4096,
            **{k: v for k, v in c.items() if k != "layer_types"},
        },
        norms=1,
    )


def _glm4(c: Config) -> Reading:
    return _dense(c, norms=4, out_bias=False)


def _olmo2(c: Config) -> Reading:
    return _dense(c, qk_norms=qk_norms(c, per_head=False))


def _moe(
    c: Config,
    experts: Experts,
    *,
    qk_norms: int = 0,
    bias: bool = False,
    out_bias: bool | None = None,
    router_bias: bool = False,
    shared: tuple[Linear, ...] = (),
    sinks: bool = False,
    dense_layers: Sequence[int] = (),
    expert_correction: bool = False,
    windows: bool = False,
) -> Reading:
    hidden = c["hidden_size"]
    layers = []
    for index in range(c["num_hidden_layers"]):
        attention, linears = attention_block(
            c, layer_window(c, index) if windows else None, bias=bias, out_bias=out_bias
        )
        other = 2 * hidden + qk_norms + (c["num_attention_heads"] if sinks else 0)
        if index in dense_layers:
            layers.append(Layer(attention, linears + gated_mlp(hidden, c["intermediate_size"]), other=other))
        else:
            router = Linear(hidden, experts.total, router_bias)
            other += experts.total if expert_correction else 0
            layers.append(Layer(attention, (*linears, router, *shared), experts, other))
    return Reading(tuple(layers), hidden)


def _mixtral(c: Config) -> Reading:
    experts = gated_experts(
        c["num_local_experts"], c["num_experts_per_tok"], c["hidden_size"], c["intermediate_size"]
    )
    return _moe(c, experts)


def _granitemoe(c: Config) -> Reading:
    return _mixtral(c)


def _olmoe(c: Config) -> Reading:
    experts = gated_experts(c["num_experts"], c["num_experts_per_tok"], c["hidden_size"], c["intermediate_size"])
    return _moe(c, experts, qk_norms=qk_norms(c, per_head=False))


def _qwen2_moe(c: Config) -> Reading:
    hidden = c["hidden_size"]
    experts = gated_experts(c["num_experts"], c["num_experts_per_tok"], hidden, c["moe_intermediate_size"])
    shared = (*gated_mlp(hidden, c["shared_expert_intermediate_size"]), Linear(hidden, 1))
    return _moe(c, experts, bias=True, out_bias=False, shared=shared)


def _qwen3_moe(c: Config) -> Reading:
    experts = gated_experts(c["num_experts"], c["num_experts_per_tok"], c["hidden_size"], c["moe_intermediate_size"])
    return _moe(c, experts, qk_norms=qk_norms(c), dense_layers=sparse_step_dense_layers(c))


def _gpt_oss(c: Config) -> Reading:
    hidden, count = c["hidden_size"], c["num_hidden_layers"]
    if not c.get("layer_types"):
        c = {**c, "layer_types": ["sliding_attention", "full_attention"] * (count // 2)}
    experts = gated_experts(
        c["num_local_experts"], c["num_experts_per_tok"], hidden, c["intermediate_size"], bias=True
    )
    return _moe(c, experts, bias=True, router_bias=True, sinks=True, windows=True)


def _glm4_moe(c: Config) -> Reading:
    hidden = c["hidden_size"]
    experts = gated_experts(c["n_routed_experts"], c["num_experts_per_tok"], hidden, c["moe_intermediate_size"])
    shared = (
        gated_mlp(hidden, c["moe_intermediate_size"] * c["n_shared_experts"]) if c.get("n_shared_experts") else ()
    )
    return _moe(
        c,
        experts,
        bias=bool(c.get("attention_bias", False)),
        out_bias=False,
        qk_norms=qk_norms(c) if c.get("use_qk_norm") else 0,
        shared=shared,
        dense_layers=range(c.get("first_k_dense_replace", 0)),
        expert_correction=True,
    )


def _deepseek(c: Config, *, absorbed: bool) -> Reading:
    hidden, heads, rank, rope = (
        c["hidden_size"],
        c["num_attention_heads"],
        c["kv_lora_rank"],
        c["qk_rope_head_dim"],
    )
    nope, value, bias = c["qk_nope_head_dim"], c["v_head_dim"], bool(c.get("attention_bias", False))
    if absorbed:
        attention = Attention("latent", heads, 1, rank + rope, rank)
        expand: tuple[Linear, ...] = (Linear(nope, rank, copies=heads), Linear(rank, value, copies=heads))
    else:
        attention = Attention("full", heads, heads, nope + rope, value)
        expand = (Linear(rank, heads * (nope + value)),)
    if c.get("q_lora_rank"):
        query: tuple[Linear, ...] = (
            Linear(hidden, c["q_lora_rank"], bias),
            Linear(c["q_lora_rank"], heads * (nope + rope)),
        )
        norms = c["q_lora_rank"] + rank
    else:
        query = (Linear(hidden, heads * (nope + rope)),)
        norms = rank
    linears = (*query, Linear(hidden, rank + rope, bias), *expand, Linear(heads * value, hidden, bias))

    experts = None
    shared: tuple[Linear, ...] = ()
    if c.get("n_routed_experts"):
        experts = gated_experts(c["n_routed_experts"], c["num_experts_per_tok"], hidden, c["moe_intermediate_size"])
        if c.get("n_shared_experts"):
            shared = gated_mlp(hidden, c["moe_intermediate_size"] * c["n_shared_experts"])
    layers = []
    for index in range(c["num_hidden_layers"]):
        other = 2 * hidden + norms
        sparse = (
            experts is not None
            and index >= c.get("first_k_dense_replace", 0)
            and index % c.get("moe_layer_freq", 1) == 0
        )
        if sparse and experts is not None:
            other += experts.total if absorbed else 0  # the router's correction bias
            layers.append(Layer(attention, (*linears, Linear(hidden, experts.total), *shared), experts, other))
        else:
            layers.append(Layer(attention, linears + gated_mlp(hidden, c["intermediate_size"]), other=other))
    return Reading(tuple(layers), hidden)


def _deepseek_v2(c: Config) -> Reading:
    return _deepseek(c, absorbed=False)


def _deepseek_v3(c: Config) -> Reading:
    return _deepseek(c, absorbed=True)


READERS: Mapping[str, Callable[[Config], Reading]] = {
    "llama": _llama,
    "mistral": _llama,
    "ministral3": _llama,
    "mistral3": _llama,
    "smollm3": _llama,
    "granite": _llama,
    "seed_oss": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma3": _gemma3,
    "cohere2": _cohere2,
    "glm4": _glm4,
    "olmo2": _olmo2,
    "mixtral": _mixtral,
    "granitemoe": _granitemoe,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "granitemoehybrid": read_granitemoehybrid,
    "mamba2": read_mamba2,
    "qwen3_next": read_qwen3_next,
    "qwen3_5": read_qwen3_5,
    "qwen3_5_moe": read_qwen3_5,
    "lfm2": read_lfm2,
    "lfm2_moe": read_lfm2_moe,
}
ALWAYS_TIED = frozenset({"gemma2", "gemma3", "gemma3_text", "cohere2"})
TIED_BY_DEFAULT = ALWAYS_TIED | {"llama", "granitemoehybrid", "lfm2", "lfm2_moe"}


def read_quantization(config: Config) -> Quantization | None:
    """How the weights are stored, from mlx-lm's `quantization` (or Hugging Face's mxfp4) entry."""
    entry = config.get("quantization")
    if isinstance(entry, Mapping) and "bits" in entry:
        return Quantization(int(entry["bits"]), int(entry["group_size"]), str(entry.get("mode", "affine")))
    entry = config.get("quantization_config")
    if isinstance(entry, Mapping):
        if "bits" in entry and "group_size" in entry:
            return Quantization(int(entry["bits"]), int(entry["group_size"]), str(entry.get("mode", "affine")))
        if entry.get("quant_method") == "mxfp4":
            return Quantization(4, 32, "mxfp4")
    return None


def read_shape(config: Config, name: str = "model") -> ModelShape:
    """The shape that a config.json describes. Raises ModelError naming the entry that is missing."""
    text: Config = config.get("text_config") or config
    model_type = str(text.get("model_type") or config.get("model_type") or "unknown")
    model_type = model_type.removesuffix("_text") if model_type not in READERS else model_type
    reader = READERS.get(model_type, _llama)
    try:
        reading = reader(text)
        hidden, vocab = int(text["hidden_size"]), int(text["vocab_size"])
    except KeyError as missing:
        known = (
            "" if model_type in READERS else f" (its model_type {model_type!r} is not known, so it was read as llama)"
        )
        raise ModelError(f"the config.json of {name} has no {missing}{known}") from missing
    except TypeError as error:
        raise ModelError(f"the config.json of {name} has an entry of the wrong kind: {error}") from error
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    return ModelShape(
        name=name,
        model_type=model_type,
        hidden=hidden,
        vocab=vocab,
        tied=model_type in ALWAYS_TIED or (model_type in TIED_BY_DEFAULT if tied is None else bool(tied)),
        layers=reading.layers,
        other=reading.other,
        max_context=int(text.get("max_position_embeddings") or 0),
        quantization=read_quantization(config),
        approximate=model_type not in READERS,
    )
