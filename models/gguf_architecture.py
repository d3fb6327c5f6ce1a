"""How each GGUF architecture maps to an mlx-lm model: tensor names, row order, and what is special to it.

The conventions are those of llama.cpp's converter, which writes these files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxbatch.errors import ModelError
from mlxbatch.models.gguf_file import GgufFile
from mlxbatch.models.gguf_metadata import Metadata
from mlxbatch.models.gguf_tensors import read_float32

Config = dict[str, Any]

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LONGROPE_TENSORS = ("rope_factors_long.weight", "rope_factors_short.weight")


def _experts(block: str) -> dict[str, str]:
    return {
        "ffn_gate_inp": f"{block}.gate",
        "ffn_gate_exps": f"{block}.switch_mlp.gate_proj",
        "ffn_up_exps": f"{block}.switch_mlp.up_proj",
        "ffn_down_exps": f"{block}.switch_mlp.down_proj",
    }


@dataclass(frozen=True)
class Architecture:
    """One kind of file.

    `block` maps the middle of `blk.N.<middle>.<weight|bias>` to a module path within layer N.
    `interleaved`: rows of attn_q and attn_k are in interleaved rotary order. `norm_offset` was added to
    every norm weight when the file was made. `complete` adds to the configuration what is special, from
    metadata and from the tensors named in `consumed`.
    """

    model_type: str
    block: Mapping[str, str]
    interleaved: bool = False
    norm_offset: float = 0.0
    complete: Callable[[Metadata, Config], None] = lambda metadata, config: None
    consumed: frozenset[str] = frozenset()

    def target(self, tensor: str) -> str | None:
        """The mlx-lm parameter that a GGUF tensor fills, or None if it is unknown."""
        if tensor in _TOP:
            return _TOP[tensor]
        parts = tensor.split(".")
        if len(parts) != 4 or parts[0] != "blk" or parts[3] not in ("weight", "bias"):
            return None
        if parts[2] not in self.block or not (parts[1].isascii() and parts[1].isdecimal() and len(parts[1]) < 6):
            return None
        return f"model.layers.{int(parts[1])}.{self.block[parts[2]]}.{parts[3]}"


def architecture_of(file: GgufFile) -> Architecture:
    """The mapping for a file, or a ModelError that names its architecture."""
    name = str(file.metadata.get("general.architecture", ""))
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return _MIXTRAL
    found = ARCHITECTURES.get(name)
    if found is None:
        raise ModelError(
            f"{file.path}: GGUF architecture {name!r} is not supported (supported: "
            f"{', '.join(ARCHITECTURES)}); use the model's safetensors, or its mlx-community version"
        )
    return found


def _tensor(metadata: Metadata, name: str) -> np.ndarray | None:
    tensor = metadata.file.tensors.get(name)
    return None if tensor is None else read_float32(metadata.file, tensor)


def _llama(metadata: Metadata, config: Config) -> None:
    factors = _tensor(metadata, "rope_freqs.weight")
    if factors is not None:
        config["rope_scaling"] = _llama3_scaling(metadata, config, factors)


def _llama3_scaling(metadata: Metadata, config: Config, factors: np.ndarray) -> Config:
    """Recover llama 3's rope_scaling from the per-frequency divisors that GGUF stores in its place.

    With s = clip((L / wavelength - low) / (high - low), 0, 1) a divisor is 1 / ((1 - s) / factor + s),
    where L = 8192, low = 1, high = 4 in every llama 3 release; only the factor differs between them.
    """
    context, low, high, factor = 8192, 1.0, 4.0, float(factors.max(initial=1.0))
    wavelengths = 2 * math.pi * config["rope_theta"] ** (np.arange(0, config["head_dim"], 2) / config["head_dim"])
    smooth = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise metadata.refuse("rope_freqs.weight does not hold llama 3's frequencies, and no others are known")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _mixtral(metadata: Metadata, config: Config) -> None:
    _llama(metadata, config)
    config["num_local_experts"] = metadata.count("expert_count", limit=4096)
    config["num_experts_per_tok"] = metadata.count("expert_used_count", limit=4096)


def _qwen3_moe(metadata: Metadata, config: Config) -> None:
    config["num_experts"] = metadata.count("expert_count", limit=4096)
    config["num_experts_per_tok"] = metadata.count("expert_used_count", limit=4096)
    config["moe_intermediate_size"] = metadata.count("expert_feed_forward_length")
    config["decoder_sparse_step"] = 1
    config["mlp_only_layers"] = []
    config["norm_topk_prob"] = True


def _gemma2(metadata: Metadata, config: Config) -> None:
    # Not stored: gemma 2 scales queries by head_dim, but the 27B (46 layers) by hidden / heads.
    large = config["num_hidden_layers"] == 46
    config["query_pre_attn_scalar"] = _heads_width(config) if large else config["head_dim"]
    config["attn_logit_softcapping"] = metadata.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = metadata.number("final_logit_softcapping", 30.0)
    config["sliding_window"] = metadata.count("attention.sliding_window", 4096)


def _gemma3(metadata: Metadata, config: Config) -> None:
    large = config["num_hidden_layers"] == 62  # the same for the 27B of gemma 3
    config["query_pre_attn_scalar"] = _heads_width(config) if large else config["head_dim"]
    config["sliding_window"] = metadata.count("attention.sliding_window")
    config["sliding_window_pattern"] = metadata.count("attention.sliding_window_pattern", 6)
    config["rope_local_base_freq"] = metadata.number("rope.freq_base_swa", 10000.0)
    if metadata.value("final_logit_softcapping", (int, float)):
        raise metadata.refuse("gemma3 with capped logits is not supported")


def _heads_width(config: Config) -> int:
    return int(config["hidden_size"] // config["num_attention_heads"])


def _phi3(metadata: Metadata, config: Config) -> None:
    original = metadata.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original
    config["partial_rotary_factor"] = metadata.count("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    long, short = (_tensor(metadata, name) for name in _LONGROPE_TENSORS)
    if long is not None and short is not None:
        config["rope_scaling"] = {
            "type": "longrope",
            "long_factor": long.tolist(),
            "short_factor": short.tolist(),
            "original_max_position_embeddings": original,
        }


_LLAMA_BLOCK = {**_ATTENTION, **_MLP, **_NORMS}
_ROPE_FREQS = frozenset({"rope_freqs.weight"})
_MIXTRAL = Architecture(
    "mixtral",
    {**_ATTENTION, **_experts("block_sparse_moe"), **_NORMS},
    interleaved=True,
    complete=_mixtral,
    consumed=_ROPE_FREQS,
)
# Mistral's files say "llama" too: the converter makes no difference between the two.
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _LLAMA_BLOCK, interleaved=True, complete=_llama, consumed=_ROPE_FREQS),
    "qwen2": Architecture("qwen2", _LLAMA_BLOCK),
    "qwen3": Architecture("qwen3", {**_LLAMA_BLOCK, **_QK_NORM}),
    "qwen3moe": Architecture(
        "qwen3_moe", {**_ATTENTION, **_QK_NORM, **_experts("mlp"), **_NORMS}, complete=_qwen3_moe
    ),
    "gemma2": Architecture("gemma2", {**_ATTENTION, **_MLP, **_GEMMA_NORMS}, norm_offset=1.0, complete=_gemma2),
    "gemma3": Architecture(
        "gemma3_text", {**_ATTENTION, **_QK_NORM, **_MLP, **_GEMMA_NORMS}, norm_offset=1.0, complete=_gemma3
    ),
    "phi3": Architecture(
        "phi3",
        {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
            **_NORMS,
        },
        complete=_phi3,
        consumed=frozenset(_LONGROPE_TENSORS),
    ),
    "smollm3": Architecture("smollm3", _LLAMA_BLOCK, interleaved=True, complete=_llama, consumed=_ROPE_FREQS),
}
