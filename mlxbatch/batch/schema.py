"""The parameters a request body may hold: OpenAI's, and the extensions that vLLM's users know."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MOST_CHOICES = 128  # OpenAI's limit for n
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints take. None stands for "not given", as null does in OpenAI's API."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Extensions.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    # Labels: they ask nothing of the model. `metadata` comes back with the answer.
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatBody(Body, kw_only=True, forbid_unknown_fields=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(Body, kw_only=True, forbid_unknown_fields=True):
    prompt: Any  # one or more texts or lists of token ids; msgspec cannot express that union
    logprobs: int | None = None
    best_of: int | None = None


class OpenAILine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One line of an OpenAI Batch input file."""

    custom_id: str
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


class PlainLine(msgspec.Struct, kw_only=True):
    """What a {"messages": ...} or {"prompt": ...} line may hold beside the parameters of its body."""

    custom_id: str | int | None = None
    id: str | int | None = None


# Parameters of OpenAI's API that are not served, each with the values that ask for nothing.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "store": (False,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
}
