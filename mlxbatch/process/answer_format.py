"""How a model's answers are marked up, so that a client can tell thinking from answer without the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mlxbatch.engine.api import TokenizerLike
from mlxbatch.errors import RequestError
from mlxbatch.models.tags import TagSet

OPENING_TOKENS = 16  # of a prompt's end; the longest thinking tag of a template is a few


def tags_of(tokenizer: TokenizerLike) -> TagSet:
    """None for a tokenizer that knows nothing of markup."""
    tags = getattr(tokenizer, "tags", None)
    return tags if isinstance(tags, TagSet) else TagSet()


def prompt_end(tokenizer: TokenizerLike, token_ids: Sequence[int]) -> str:
    """The end of a chat's prompt, as far as it matters to its answer."""
    return tokenizer.decode(list(token_ids[-OPENING_TOKENS:]), skip_special_tokens=False)


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`opening` is how prompts end: many templates open the thinking themselves."""

    tags: TagSet = TagSet()
    opening: str = ""


def answer_format(tokenizer: TokenizerLike) -> AnswerFormat:
    """Read off the tokenizer; models without a chat template have no markup."""
    tags = tags_of(tokenizer)
    if not tags.tags:
        return AnswerFormat()
    try:
        ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    except RequestError:
        return AnswerFormat(tags=tags)
    return AnswerFormat(tags=tags, opening=prompt_end(tokenizer, ids))
