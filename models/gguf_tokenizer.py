"""Rebuilding the tokenizer of a GGUF file from its metadata."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, processors

from mlxbatch.errors import ModelError
from mlxbatch.models.gguf_file import GgufFile
from mlxbatch.models.gguf_pretokenizer import PRE_TOKENIZERS
from mlxbatch.models.gguf_sentencepiece import SentencePieceCodec
from mlxbatch.models.gguf_vocabulary import GgufVocabulary
from mlxbatch.models.tokenizer import FastCodec, ModelTokenizer, TokenCodec

_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def build_tokenizer(file: GgufFile) -> ModelTokenizer:
    """The tokenizer of a GGUF file. Raises ModelError naming what is missing or not supported."""
    vocabulary = GgufVocabulary(file)
    kind = vocabulary.text("model")
    codec: TokenCodec
    if kind == "gpt2":
        codec = _byte_level(vocabulary)
    elif kind == "llama":
        codec = SentencePieceCodec(vocabulary)
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


def _byte_level(vocabulary: GgufVocabulary) -> TokenCodec:
    """Byte-level BPE ("gpt2"): tokens, merges, and the pre-tokenizer by name."""
    name = vocabulary.text("pre")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise ModelError(
            f"{vocabulary.path}: pre-tokenizer {name!r} is not supported "
            f"(supported: {', '.join(sorted(PRE_TOKENIZERS))})"
        )
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=_merges(vocabulary), ignore_merges=pre.whole_words))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{vocabulary.path}: the merges do not fit the vocabulary: {error}") from None
    if pre.normalizer is not None:
        tokenizer.normalizer = pre.normalizer()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(vocabulary.added_tokens())
    _add_bos(tokenizer, vocabulary, pre.bos)
    return FastCodec(tokenizer)


def _merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    merges = []
    for merge in vocabulary.strings("merges"):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise ModelError(f"{vocabulary.path}: {merge!r:.60} is not a BPE merge")
        merges.append((left, right))
    return merges


def _add_bos(tokenizer: Tokenizer, vocabulary: GgufVocabulary, default: bool) -> None:
    bos = vocabulary.token_id("bos_token_id")
    if bos is None or not vocabulary.flag("add_bos_token", default):
        return
    # By a name of our own: the token's text may hold what the template syntax gives a meaning to.
    special = {"id": "BOS", "ids": [bos], "tokens": [vocabulary.tokens[bos]]}
    tokenizer.post_processor = processors.TemplateProcessing(single="BOS $A", special_tokens=[special])
