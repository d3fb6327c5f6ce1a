"""The `tokenizer.*` metadata of a GGUF file, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from mlxbatch.errors import ModelError
from mlxbatch.models.gguf_file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Control tokens that end an answer, whatever the file's eos_token_id says: files often name only one.
# fmt: off
_END_OF_ANSWER = frozenset([
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>",
    "<|return|>", "<|call|>", "<EOT>", "<｜end▁of▁sentence｜>",
])
# fmt: on


class GgufVocabulary:
    """Tokens in the order of their ids, and the kind of each (NORMAL, CONTROL ...)."""

    def __init__(self, file: GgufFile) -> None:
        self.path: Path = file.path
        self._metadata = file.metadata
        self.tokens: list[str] = self.strings("tokens")
        if not self.tokens:
            raise ModelError(f"{self.path}: the vocabulary is empty")
        kinds = self.optional("token_type", list)
        if kinds is not None and len(kinds) != len(self.tokens):
            raise ModelError(f"{self.path}: {len(self.tokens)} tokens, but {len(kinds)} token types")
        self.kinds: list[int] = kinds or [NORMAL] * len(self.tokens)

    def optional(self, key: str, kind: type, prefix: str = "tokenizer.ggml.") -> Any:
        value = self._metadata.get(prefix + key)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise ModelError(f"{self.path}: metadata {prefix}{key} is {value!r:.80}, which is not supported")
        return value

    def text(self, key: str) -> str:
        value = self.optional(key, str)
        if value is None:
            raise ModelError(f"{self.path}: metadata tokenizer.ggml.{key} is missing")
        return str(value)

    def strings(self, key: str) -> list[str]:
        value = self.optional(key, list)
        if value is None or not all(isinstance(item, str) for item in value):
            raise ModelError(f"{self.path}: metadata tokenizer.ggml.{key} is missing or not a list of strings")
        return list(value)

    def scores(self) -> list[float]:
        value = self.optional("scores", list)
        if value is None or len(value) != len(self.tokens) or not all(isinstance(x, float) for x in value):
            raise ModelError(f"{self.path}: metadata tokenizer.ggml.scores is missing or does not fit the tokens")
        return list(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.optional(key, bool)
        return default if value is None else bool(value)

    def token_id(self, key: str) -> int | None:
        value = self.optional(key, int)
        return value if value is not None and 0 <= value < len(self.tokens) else None

    def of_kind(self, *kinds: int) -> dict[str, int]:
        """Tokens of these kinds and their ids."""
        return {
            token: i for i, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)) if kind in kinds
        }

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """What the file names as the end of a text, a turn or a message, and the known control tokens."""
        named = {self.token_id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")}
        known = {index for token, index in self.of_kind(CONTROL).items() if token in _END_OF_ANSWER}
        return frozenset(known | {index for index in named if index is not None})

    def added_tokens(self) -> list[AddedToken]:
        """Tokens that are found in a text before it is split: control tokens and the model's own words."""
        return [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(self.tokens, self.kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED) and token
        ]
