"""From a BatchItem to the token ids of its prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mlxbatch.batch.item import BatchItem
from mlxbatch.engine.api import TokenizerLike


class Prompt(NamedTuple):
    token_ids: tuple[int, ...]
    text: str | None = None  # None for chats and for prompts given as ids


def tokenize(item: BatchItem, tokenizer: TokenizerLike, template_args: Mapping[str, object]) -> list[Prompt]:
    """One Prompt for a chat, one for each prompt of a completion. Raises RequestError where the chat template does.

    `template_args` are the run's; an item's own come before them.
    """
    if item.messages is not None:
        arguments = {**template_args, **item.template_args}
        return [Prompt(tuple(tokenizer.encode_chat(item.messages, **arguments)))]
    return [
        Prompt(tuple(tokenizer.encode(prompt)), prompt) if isinstance(prompt, str) else Prompt(prompt)
        for prompt in item.prompts
    ]
