"""Tiny random models of the main attention families, and mlx-lm directories that hold them.

They are random but not degenerate: weights are scaled so that attention matters and two best logits
rarely tie. mlx must be prepared (`prepare_backend`) before this module is imported.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
MAX_POSITIONS = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN = "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TRAINING_TEXT = (
    "A request joins the batch between two steps and leaves it when it is finished.",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid.",
    "One engine owns the model and the memory of keys and values; at every step it forms the batch again.",
    "def add(first, second):\n    return first + second\n\nprint(add(19, 23))\n",
    "Blocks are written once, shared by reference, and freed when nothing needs them any more.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Déjà vu, naïve, façade, señor.",
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": MAX_POSITIONS,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "tie_word_embeddings": False, "num_key_value_heads": 1},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 24},
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 4,
        "sliding_window": 32,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 1000.0,
    },
}


def config_of(name: str) -> dict[str, Any]:
    """The configuration of a tiny model, as its config.json would hold it."""
    return {**_COMMON, **CONFIGS[name]}


def randomize(model: nn.Module, seed: int) -> None:
    """Give every parameter of `model` random float32 values that depend only on its name and `seed`."""
    values = []
    for index, (path, array) in enumerate(sorted(tree_flatten(model.parameters()))):
        noise = mx.random.normal(array.shape, key=mx.random.key(seed * 100_003 + index))
        if "norm" in path and array.ndim == 1:
            offset = 0.0 if "gemma" in str(getattr(model, "model_type", "")) else 1.0
            values.append((path, offset + 0.1 * noise))
        elif array.ndim == 1:
            values.append((path, 0.1 * noise))
        else:
            values.append((path, noise * (1.3 / array.shape[-1] ** 0.5)))
    model.update(tree_unflatten(values))
    mx.eval(model.parameters())


def build(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny random model of one family in float32, in eval mode, and its configuration."""
    config = config_of(name)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    randomize(model, seed)
    model.eval()
    return model, config


@cache
def tokenizer_json() -> str:
    """A byte-level BPE tokenizer with VOCAB_SIZE entries, three special tokens, and every byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    return str(tokenizer.to_str())


def write_tokenizer(path: Path) -> None:
    """tokenizer.json and tokenizer_config.json, with a chat template."""
    (path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": EOS_TOKEN,
        "pad_token": "<|endoftext|>",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def write_dir(name: str, path: Path | str, seed: int = 0) -> Path:
    """Write a complete mlx-lm directory: config, generation config, safetensors, tokenizer, template."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    model, config = build(name, seed)
    eos = SPECIAL_TOKENS.index(EOS_TOKEN)
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": eos}, indent=1), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos]}), encoding="utf-8")
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    write_tokenizer(folder)
    return folder
