"""Rebuilding the tokenizer of a GGUF file from its metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from mlxbatch.errors import ModelError
from mlxbatch.models.gguf_file import GgufFile
from mlxbatch.models.gguf_pretokenizer import PRE_TOKENIZERS
from mlxbatch.models.tokenizer import FastCodec, ModelTokenizer, TokenCodec

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Control tokens that end an answer, whatever the file's eos_token_id says: files often name only one.
_END_OF_ANSWER = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
        "<end_of_turn>", "<|return|>", "<|call|>", "<EOT>", "<｜end▁of▁sentence｜>",
    }  # fmt: skip
)


def build_tokenizer(file: GgufFile) -> ModelTokenizer:
    """The tokenizer of a GGUF file. Raises ModelError naming what is missing or not supported."""
    vocabulary = GgufVocabulary(file)
    kind = vocabulary.text("model")
    if kind == "gpt2":
        codec = _byte_level(vocabulary)
    else:
        raise ModelError(f"{file.path}: tokenizer kind {kind!r} is not supported (gpt2 and llama are)")
    special = {
        name: vocabulary.tokens[index]
        for name, key in _SPECIAL_KEYS.items()
        if (index := vocabulary.token_id(key)) is not None
    }
    return ModelTokenizer(
        codec,
        eos_token_ids=vocabulary.eos_token_ids,
        bos_token_id=vocabulary.token_id("bos_token_id"),
        special_tokens=special,
        chat_template=vocabulary.optional("chat_template", str, prefix="tokenizer."),
    )


class GgufVocabulary:
    """The `tokenizer.*` metadata of a file, checked."""

    def __init__(self, file: GgufFile) -> None:
        self.path: Path = file.path
        self._metadata = file.metadata
        self.tokens: list[str] = self.strings("tokens")
        count = len(self.tokens)
        types = self.optional("token_type", list)
        self.types: list[int] = types if types and len(types) == count else [1] * count
        if not self.tokens:
            raise ModelError(f"{self.path}: the vocabulary is empty")

    def optional(self, key: str, kind: type, prefix: str = "tokenizer.ggml.") -> Any:
        value = self._metadata.get(prefix + key)
        if value is not None and not isinstance(value, kind):
            raise ModelError(f"{self.path}: metadata {prefix}{key} is {value!r:.80}, which makes no sense")
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

    def flag(self, key: str, default: bool) -> bool:
        value = self.optional(key, bool)
        return default if value is None else bool(value)

    def token_id(self, key: str) -> int | None:
        value = self.optional(key, int)
        return value if value is not None and 0 <= value < len(self.tokens) else None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        named = {self.token_id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")}
        known = {
            index
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind == _CONTROL and token in _END_OF_ANSWER
        }
        return frozenset(known | {index for index in named if index is not None})

    def added_tokens(self) -> list[AddedToken]:
        """Tokens that are found in a text before it is split: control tokens and the model's own words."""
        return [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED) and token
        ]


def _byte_level(vocabulary: GgufVocabulary) -> TokenCodec:
    """Byte-level BPE ("gpt2"): tokens, merges, and the pre-tokenizer by name."""
    name = vocabulary.text("pre")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise ModelError(
            f"{vocabulary.path}: pre-tokenizer {name!r} is not supported "
            f"(supported: {', '.join(sorted(PRE_TOKENIZERS))})"
        )
    merges = []
    for merge in vocabulary.strings("merges"):
        left, space, right = merge.partition(" ") if not merge.startswith(" ") else ("", "", "")
        if not space or not left or not right:
            raise ModelError(f"{vocabulary.path}: {merge!r:.60} is not a BPE merge")
        merges.append((left, right))
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=pre.whole_words))
    except Exception as error:
        raise ModelError(f"{vocabulary.path}: the vocabulary and its merges do not fit: {error}") from None
    if pre.normalizer is not None:
        tokenizer.normalizer = pre.normalizer()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(vocabulary.added_tokens())
    bos = vocabulary.token_id("bos_token_id")
    if bos is not None and vocabulary.flag("add_bos_token", pre.bos):
        text = vocabulary.tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{text} $A", special_tokens=[(text, bos)]
        )
    return FastCodec(tokenizer)
