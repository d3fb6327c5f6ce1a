"""How each GGUF architecture maps to an mlx-lm model: its configuration, tensor names and row order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlxbatch.errors import ModelError
from mlxbatch.models.gguf_file import GgufFile
from mlxbatch.models.gguf_tensors import read_float32

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


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`.

    `block` maps the middle of `blk.N.<middle>.<weight|bias>` to a module path within layer N.
    `interleaved`: rows of attn_q and attn_k are in interleaved rotary order. `norm_offset` was added to
    every norm weight when the file was made. `extra` completes the configuration.
    """

    model_type: str
    block: Mapping[str, str]
    interleaved: bool = False
    norm_offset: float = 0.0
    extra: Callable[[Header, dict[str, Any]], None] = lambda header, config: None
    consumed: frozenset[str] = field(default=frozenset())  # tensors that became configuration

    def target(self, tensor: str) -> str | None:
        """The mlx-lm parameter that a GGUF tensor fills, or None if it is unknown."""
        if tensor in _TOP:
            return _TOP[tensor]
        parts = tensor.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and parts[3] in ("weight", "bias"):
            module = self.block.get(parts[2])
            return f"model.layers.{int(parts[1])}.{module}.{parts[3]}" if module else None
        return None


class Header:
    """Typed access to the metadata of one file, by key without its architecture prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.name = str(file.metadata.get("general.architecture", ""))

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        full = key if key.startswith("general.") else f"{self.name}.{key}"
        value = self.file.metadata.get(full, default)
        if value is not None and not isinstance(value, kind):
            raise ModelError(f"{self.file.path}: metadata {full} is {value!r:.80}, which makes no sense")
        return value

    def count(self, key: str, default: int | None = None, limit: int = 1 << 24) -> int:
        value = self.get(key, int, default)
        if value is None:
            raise ModelError(f"{self.file.path}: metadata {self.name}.{key} is missing")
        if not 0 < value <= limit:
            raise ModelError(f"{self.file.path}: metadata {self.name}.{key} is {value}, not 1 to {limit}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, (int, float), default)
        if value is None or not math.isfinite(value):
            raise ModelError(f"{self.file.path}: metadata {self.name}.{key} is missing or not a number")
        return float(value)

    def tensor(self, name: str) -> np.ndarray | None:
        tensor = self.file.tensors.get(name)
        return None if tensor is None else read_float32(self.file, tensor)


def architecture_of(file: GgufFile) -> Architecture:
    """The mapping for a file, or a ModelError that names its architecture."""
    name = str(file.metadata.get("general.architecture", ""))
    found = ARCHITECTURES.get(name)
    if found is None:
        raise ModelError(
            f"{file.path}: GGUF architecture {name!r} is not supported (supported: {', '.join(ARCHITECTURES)}); "
            "use the model's safetensors or mlx-community version instead"
        )
    return found


def build_config(file: GgufFile) -> dict[str, Any]:
    """The config.json that mlx-lm would read for the model in a GGUF file."""
    architecture = architecture_of(file)
    header = Header(file)
    heads = header.count("attention.head_count", limit=1 << 16)
    hidden = header.count("embedding_length")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": header.count("feed_forward_length"),
        "num_hidden_layers": header.count("block_count", limit=4096),
        "num_attention_heads": heads,
        "num_key_value_heads": header.count("attention.head_count_kv", heads, limit=1 << 16),
        "head_dim": header.count("attention.key_length", hidden // heads),
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": header.number("rope.freq_base", 10000.0),
        "max_position_embeddings": header.count("context_length", limit=1 << 30),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    _add_rope_scaling(header, config)
    architecture.extra(header, config)
    return config


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing or not a matrix")
    return embedding.shape[0]


def _add_rope_scaling(header: Header, config: dict[str, Any]) -> None:
    kind = header.get("rope.scaling.type", str, "none")
    if kind == "none":
        return
    if kind not in ("linear", "yarn", "longrope"):
        raise ModelError(f"{header.file.path}: rope scaling {kind!r} is not supported")
    if kind == "longrope":
        return  # phi3 reads its factors from tensors
    scaling: dict[str, Any] = {"rope_type": kind, "factor": header.number("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = header.count("rope.scaling.original_context_length")
    config["rope_scaling"] = scaling


def _llama(header: Header, config: dict[str, Any]) -> None:
    factors = header.tensor("rope_freqs.weight")
    if factors is not None:
        config["rope_scaling"] = _llama3_scaling(header, config, factors)
    if header.get("expert_count", int, 0):
        raise ModelError(f"{header.file.path}: mixture-of-experts models in GGUF are not supported")


def _llama3_scaling(header: Header, config: dict[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """Recover llama 3's rope_scaling from the per-frequency divisors that GGUF stores in its place."""
    head_dim = config["head_dim"]
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * math.pi * config["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    turns = 8192 / wavelengths
    smooth = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1.0 / ((1 - smooth) / scaling["factor"] + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(f"{header.file.path}: the rope frequencies are not llama 3's, and no other kind is known")
    return scaling


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama",
        {**_ATTENTION, **_MLP, **_NORMS},
        interleaved=True,
        extra=_llama,
        consumed=frozenset({"rope_freqs.weight"}),
    ),
}
