"""The tokenizer of an mlx-lm or Hugging Face directory."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxbatch.errors import ModelError
from mlxbatch.models.tokenizer import FastCodec, ModelTokenizer, SlowCodec, TokenCodec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_directory_tokenizer(folder: Path, config: dict[str, Any]) -> ModelTokenizer:
    """Load through transformers, never running code from the directory. Raises ModelError."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"cannot load the tokenizer in {folder}: {error}") from None
    special = {name: text for name in _SPECIAL_NAMES if (text := getattr(tokenizer, name, None))}
    return ModelTokenizer(
        _codec(tokenizer),
        eos_token_ids=_eos_token_ids(folder, config, tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        special_tokens=special,
        chat_template=_template(tokenizer),
    )


def _codec(tokenizer: PreTrainedTokenizerBase) -> TokenCodec:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return FastCodec(backend) if backend is not None else SlowCodec(tokenizer)


def _template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # named templates: "default", "tool_use" ...
        template = template.get("default") or next(iter(template.values()), None)
    return template or None


def _eos_token_ids(folder: Path, config: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The union of the generation config, the model config, and the tokenizer."""
    found: set[int] = set()
    generation: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # optional: without it only extra stop tokens are lost
        generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    text = config.get("text_config")
    nested = text.get("eos_token_id") if isinstance(text, dict) else None
    for value in (generation.get("eos_token_id"), config.get("eos_token_id"), nested, tokenizer.eos_token_id):
        ids = value if isinstance(value, list) else [value]
        found.update(token for token in ids if isinstance(token, int) and token >= 0)
    return frozenset(found)
