"""The tokenizer that requests go through, whatever the model's own is made of."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from mlxbatch.errors import RequestError
from mlxbatch.models.chat_template import ChatTemplate
from mlxbatch.models.stream_decoder import FastStreamDecoder, SlowStreamDecoder
from mlxbatch.models.tags import TagSet, detect_tags

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    from mlxbatch.engine.api import StreamDecoder


class TokenCodec(Protocol):
    """Text to ids and back, with nothing added that was not asked for."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, *, special: bool) -> list[int]:
        """`special`: let the tokenizer add what it puts around a text (BOS, sometimes more)."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def stream_decoder(self, skip_special_tokens: bool) -> StreamDecoder: ...
    def added_tokens(self) -> dict[str, bool]:
        """Texts that are one token wherever they stand, and whether each is special."""
        ...


def added_tokens_of(tokenizer: Tokenizer) -> dict[str, bool]:
    """The added tokens of a `tokenizers` tokenizer."""
    return {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}


class FastCodec:
    """A `tokenizers` tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = int(tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, special: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def stream_decoder(self, skip_special_tokens: bool) -> StreamDecoder:
        return FastStreamDecoder(self.tokenizer, skip_special_tokens)

    def added_tokens(self) -> dict[str, bool]:
        return added_tokens_of(self.tokenizer)


class SlowCodec:
    """A transformers tokenizer that has no fast backend."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)

    def encode(self, text: str, *, special: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=special))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def stream_decoder(self, skip_special_tokens: bool) -> StreamDecoder:
        return SlowStreamDecoder(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens))

    def added_tokens(self) -> dict[str, bool]:
        return {token.content: token.special for token in self.tokenizer.added_tokens_decoder.values()}


class ModelTokenizer:
    """A codec with the special tokens and the chat template of one model (a TokenizerLike).

    `special_tokens` maps bos_token, eos_token, unk_token, pad_token to their text, where the model has
    them. `eos_token_ids` is the union of everything that ends an answer.
    """

    def __init__(
        self,
        codec: TokenCodec,
        *,
        eos_token_ids: frozenset[int],
        bos_token_id: int | None,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
    ) -> None:
        self.codec = codec
        self.special_tokens = dict(special_tokens)
        self.bos_token_id = bos_token_id
        self._eos_token_ids = eos_token_ids
        self._chat_template = ChatTemplate(chat_template, special_tokens) if chat_template else None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    @property
    def vocab_size(self) -> int:
        return self.codec.vocab_size

    @property
    def chat_template(self) -> str | None:
        return self._chat_template.source if self._chat_template else None

    @cached_property
    def tags(self) -> TagSet:
        """How the model marks its reasoning and its tool calls."""
        return detect_tags(self.chat_template, self.codec.added_tokens())

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Ids of plain text. A text that already starts with BOS gets no second one."""
        bos = self.special_tokens.get("bos_token")
        return self.codec.encode(text, special=add_bos and not (bos and text.startswith(bos)))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return self.codec.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def stream_decoder(self, skip_special_tokens: bool = True) -> StreamDecoder:
        return self.codec.stream_decoder(skip_special_tokens)

    def render_chat(self, messages: list[dict[str, object]], /, **template_args: object) -> str:
        """The text that the chat template makes of a conversation, generation prompt added."""
        if self._chat_template is None:
            raise RequestError(
                "this model has no chat template; send a plain prompt instead",
                code="no_chat_template",
                param="messages",
            )
        return self._chat_template.render(messages, **template_args)

    def encode_chat(self, messages: list[dict[str, object]], /, **template_args: Any) -> list[int]:
        """Ids of a conversation. The template alone decides on BOS; were it to give two, one is dropped."""
        ids = self.codec.encode(self.render_chat(messages, **template_args), special=False)
        if self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            del ids[0]
        return ids
