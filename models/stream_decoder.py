"""Turning a stream of token ids into text, a whole character at a time."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_REPLACEMENT = "\ufffd"
_PATIENCE = 64  # ids held back for a character; no character has so many, so only garbage ends there


class FastStreamDecoder:
    """`push` gives the text that a token completes, `finish` what was held back.

    All pieces together are what decoding all ids at once gives (but for byte tokens that make no
    character: decoding them at once also spoils good bytes before them, which a stream has given out by
    then). `tokenizers.DecodeStream` does the work (about 2 us a token); this class adds the end of the
    stream, and an answer where it gives up.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._context: list[int] = []  # ids of the last piece: a decoder may look back at them
        self._pending: list[int] = []  # ids whose text has not been given out

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._step(token_id)
        if text:
            self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        if not self._pending:
            return ""
        text = self._text_of_pending()
        self._context, self._pending = [], []
        return text

    def _step(self, token_id: int) -> str:
        if self._stream is not None:
            try:
                return self._stream.step(self._tokenizer, token_id) or ""
            except Exception:  # it refuses some byte sequences for good ("Invalid prefix encountered")
                self._stream = None
        text = self._text_of_pending()
        return "" if text.endswith(_REPLACEMENT) and len(self._pending) < _PATIENCE else text

    def _text_of_pending(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=self._skip)
        after = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=self._skip)
        return after[len(before) :]


class SlowStreamDecoder:
    """The same for tokenizers without a fast backend: two short decodes per token."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._text_of_pending()
        if not text or (text.endswith(_REPLACEMENT) and len(self._pending) < _PATIENCE):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        text = self._text_of_pending() if self._pending else ""
        self._context, self._pending = [], []
        return text

    def _text_of_pending(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]
