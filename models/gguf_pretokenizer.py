"""The pre-tokenizers that GGUF files name but do not contain.

`tokenizer.ggml.pre` holds a short name. Each name stands for what the original model's tokenizer.json
has at that place; the patterns are those of the models' own published tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST_SLASH}"
)
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_SLASH}"


@dataclass(frozen=True)
class PreTokenization:
    """`whole_words`: a word that is itself a token is not built from merges. `bos`: added unless told not to."""

    build: Callable[[], PreTokenizer]
    normalizer: Callable[[], Normalizer] | None = None
    whole_words: bool = False
    bos: bool = False


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_gpt2() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


_GPT2 = PreTokenization(_gpt2)
_DIGITS = PreTokenization(_digits_gpt2)
_LLAMA_BPE = PreTokenization(_split(_LLAMA3), whole_words=True, bos=True)
_QWEN = PreTokenization(_split(_QWEN2), normalizer=normalizers.NFC)

PRE_TOKENIZERS: Mapping[str, PreTokenization] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama-bpe": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "dbrx": PreTokenization(_split(_LLAMA3)),
    "smaug-bpe": PreTokenization(_split(_LLAMA3)),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "megrez": _QWEN,
    "qwen35": PreTokenization(_split(_QWEN35), normalizer=normalizers.NFC),
    "gpt-4o": PreTokenization(_split(_GPT4O)),
    "tekken": PreTokenization(_split(_TEKKEN), whole_words=True, bos=True),
}
