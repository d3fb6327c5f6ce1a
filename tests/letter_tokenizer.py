"""A tokenizer for tests without a model: token 0 is EOS, token i a letter, two tokens make one "é"."""

from __future__ import annotations

ALPHABET = "_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUV"  # 47 letters; ids 48 and 49 are the halves of é
FIRST_HALF, SECOND_HALF = 48, 49


class LetterDecoder:
    def __init__(self) -> None:
        self._half = False

    def push(self, token_id: int) -> str:
        if token_id == FIRST_HALF and not self._half:
            self._half = True
            return ""
        if self._half:
            self._half = False
            return "é" if token_id == SECOND_HALF else "\ufffd" + self.push(token_id)
        return "\ufffd" if token_id == SECOND_HALF else ALPHABET[token_id] if token_id < len(ALPHABET) else "?"

    def finish(self) -> str:
        half, self._half = self._half, False
        return "\ufffd" if half else ""


class LetterTokenizer:
    vocab_size = 50

    def __init__(self, eos: frozenset[int] = frozenset()) -> None:
        self.eos_token_ids = eos

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        return [ALPHABET.index(letter) for letter in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        decoder = LetterDecoder()
        return "".join(decoder.push(t) for t in token_ids) + decoder.finish()

    def stream_decoder(self, skip_special_tokens: bool = True) -> LetterDecoder:
        return LetterDecoder()

    def encode_chat(self, messages: list[dict[str, object]], /, **template_args: object) -> list[int]:
        return self.encode("".join(str(m["content"]) for m in messages))
