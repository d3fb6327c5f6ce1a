"""SentencePiece tokenizers ("llama" in GGUF), rebuilt from pieces and scores."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import Tokenizer, decoders, models

from mlxbatch.errors import ModelError
from mlxbatch.models.gguf_vocabulary import BYTE, CONTROL, UNKNOWN, GgufVocabulary
from mlxbatch.models.stream_decoder import FastStreamDecoder
from mlxbatch.models.tokenizer import added_tokens_of

if TYPE_CHECKING:
    from mlxbatch.engine.api import StreamDecoder

_BPE = 2  # TrainerSpec.ModelType


class SentencePieceCodec:
    """sentencepiece encodes; a `tokenizers` decoder over the same vocabulary decodes, also as a stream.

    Control tokens in a text become their ids, and what stands between them is encoded by itself, with a
    space in front where the model wants one. llama.cpp reads these files in the same way.
    """

    def __init__(self, vocabulary: GgufVocabulary) -> None:
        self.vocab_size = len(vocabulary.tokens)
        self._space_prefix = vocabulary.flag("add_space_prefix", True)
        self._processor = SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(_model_proto(vocabulary, self._space_prefix))
        except Exception as error:
            raise ModelError(f"{vocabulary.path}: sentencepiece refuses the vocabulary: {error}") from None
        self._control = {token: index for token, index in vocabulary.of_kind(CONTROL).items() if token}
        longest_first = sorted(self._control, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self._before = _ids_if(vocabulary, "add_bos_token", True, "bos_token_id")
        self._after = _ids_if(vocabulary, "add_eos_token", False, "eos_token_id")
        self._decoder = self._new_decoder(vocabulary)

    def _new_decoder(self, vocabulary: GgufVocabulary) -> Tokenizer:
        vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._space_prefix:
            steps.append(decoders.Strip(" ", 1, 0))
        tokenizer.decoder = decoders.Sequence(steps)
        tokenizer.add_tokens(vocabulary.added_tokens())
        return tokenizer

    def encode(self, text: str, *, special: bool) -> list[int]:
        ids = list(self._before) if special else []
        for part in self._split.split(text) if self._split else [text]:
            if part in self._control:
                ids.append(self._control[part])
            elif part:
                ids += self._processor.EncodeAsIds(part)
        return ids + self._after if special else ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(self._decoder.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def stream_decoder(self, skip_special_tokens: bool) -> StreamDecoder:
        return FastStreamDecoder(self._decoder, skip_special_tokens)

    def added_tokens(self) -> dict[str, bool]:
        return added_tokens_of(self._decoder)


def _ids_if(vocabulary: GgufVocabulary, flag: str, default: bool, key: str) -> list[int]:
    token = vocabulary.token_id(key)
    return [token] if token is not None and vocabulary.flag(flag, default) else []


def _model_proto(vocabulary: GgufVocabulary, space_prefix: bool) -> bytes:
    """The sentencepiece model that the file's tokens came from."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.trainer_spec.model_type = _BPE
    proto.trainer_spec.byte_fallback = BYTE in vocabulary.kinds
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = space_prefix
    proto.normalizer_spec.remove_extra_whitespaces = False
    unknown = vocabulary.token_id("unknown_token_id")
    if UNKNOWN not in vocabulary.kinds and unknown is None:
        unknown = 0
    for index, (token, score, kind) in enumerate(
        zip(vocabulary.tokens, vocabulary.scores(), vocabulary.kinds, strict=True)
    ):
        if index == unknown:
            kind = UNKNOWN
        elif kind == UNKNOWN and unknown is not None:
            kind = CONTROL
        proto.pieces.add(piece=token, score=score, type=kind)
    proto.trainer_spec.unk_id = unknown if unknown is not None else vocabulary.kinds.index(UNKNOWN)
    return proto.SerializeToString()
