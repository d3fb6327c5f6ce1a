"""From a request body to a BatchItem. Nothing is ignored: a parameter is served, or accepted because its
value asks for nothing, or refused by name.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import msgspec

from mlxbatch.batch.item import BatchItem, CustomId, LineError, RequestDefaults
from mlxbatch.batch.schema import MOST_CHOICES, NEUTRAL_VALUES, Body, ChatBody, CompletionBody, Message
from mlxbatch.errors import RequestError
from mlxbatch.json_values import problem_for_the_engine
from mlxbatch.request import LARGEST_INTEGER, SamplingParams

T = TypeVar("T")

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


@dataclass(frozen=True, slots=True)
class BodyReader:
    """Reads the body found at JSON path `path` ("$" or "$.body") of a line. Every method raises LineError."""

    line: int
    custom_id: CustomId
    path: str
    defaults: RequestDefaults

    def chat(self, body: dict[str, Any]) -> BatchItem:
        values = self._values(body, ChatBody)
        if not values.messages:
            self.refuse("there are no messages", "messages")
        messages = [self._message(message, index) for index, message in enumerate(values.messages)]
        if self.defaults.system is not None and not any(m["role"] == "system" for m in messages):
            messages.insert(0, {"role": "system", "content": self.defaults.system})
        if values.max_completion_tokens is not None:
            if values.max_tokens not in (None, values.max_completion_tokens):
                self.refuse("max_tokens and max_completion_tokens disagree", "max_completion_tokens")
            values.max_tokens = values.max_completion_tokens
        if "messages" in (values.chat_template_kwargs or {}):
            self.refuse("the messages stand beside chat_template_kwargs, not in it", "chat_template_kwargs.messages")
        if values.top_logprobs and not values.logprobs:
            self.refuse("top_logprobs needs logprobs to be true", "top_logprobs")
        logprobs = (values.top_logprobs or 0) if values.logprobs else None
        return BatchItem(
            line=self.line,
            custom_id=self.custom_id,
            params=self._params(values, logprobs, None),
            messages=messages,
            template_args=values.chat_template_kwargs or {},
            metadata=values.metadata,
            named_model=values.model,
            skip_special_tokens=values.skip_special_tokens,
        )

    def completion(self, body: dict[str, Any], default_max_tokens: int | None = None) -> BatchItem:
        """`default_max_tokens` holds when neither the body nor the run names a limit; None: what fits."""
        values = self._values(body, CompletionBody)
        if values.best_of not in (None, values.n or 1):
            self.refuse("best_of other than n is not supported", "best_of", code="unsupported_parameter")
        return BatchItem(
            line=self.line,
            custom_id=self.custom_id,
            params=self._params(values, values.logprobs, default_max_tokens),
            prompts=self._prompts(values.prompt),
            metadata=values.metadata,
            named_model=values.model,
        )

    def _values(self, body: dict[str, Any], kind: type[T]) -> T:
        for name, value in body.items():
            problem = problem_for_the_engine(value)
            if problem:
                self.refuse(f"{name} {problem}", name)
        return self.convert(body, kind)

    def convert(self, body: dict[str, Any], kind: type[T]) -> T:
        """`body` as `kind`, type by type."""
        fields = kind.__struct_fields__  # type: ignore[attr-defined]
        wanted = {}
        for name, value in body.items():
            if name in fields or name not in NEUTRAL_VALUES:
                wanted[name] = value
            elif value is not None and value not in NEUTRAL_VALUES[name]:
                self.refuse(f"{name} is not supported", name, code="unsupported_parameter")
        try:
            return msgspec.convert(wanted, kind)
        except msgspec.ValidationError as error:
            message, _, where = str(error).rpartition(" - at `$")
            message, where = (message, where[:-1].lstrip(".")) if message else (where, "")
            unknown = _UNKNOWN_FIELD.fullmatch(message)
            if unknown:
                param = f"{where}.{unknown[1]}".lstrip(".")
                self.refuse(f"unknown parameter {unknown[1]!r}", param, code="unknown_parameter")
            self.refuse(message, where)

    def refuse(self, message: str, param: str = "", *, code: str = "invalid_request") -> NoReturn:
        raise LineError(
            message,
            code=code,
            path=f"{self.path}.{param}" if param else self.path,
            param=param or None,
            custom_id=self.custom_id,
        )

    def _message(self, message: Message, index: int) -> dict[str, Any]:
        """A message as chat templates know it: text parts joined, "developer" under its older name."""
        where = f"messages[{index}].content"
        content = message.content
        if isinstance(content, list):
            texts = []
            for number, part in enumerate(content):
                if part.get("type") != "text":
                    kind = f"content of type {part.get('type')!r} is not supported"
                    self.refuse(kind, f"{where}[{number}]", code="unsupported_parameter")
                if not isinstance(part.get("text"), str) or len(part) != 2:
                    self.refuse("a text part has a type and a text, nothing else", f"{where}[{number}]")
                texts.append(part["text"])
            content = "".join(texts)
        if content is None and not message.tool_calls:
            self.refuse("the message has no content", where)
        role = "system" if message.role == "developer" else message.role
        optional = {
            "name": message.name,
            "tool_calls": message.tool_calls,
            "tool_call_id": message.tool_call_id,
        }
        return {"role": role, "content": content or ""} | {k: v for k, v in optional.items() if v is not None}

    def _prompts(self, prompt: Any) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(prompt, str):
            return (prompt,)
        if not isinstance(prompt, list) or not prompt:
            self.refuse("a prompt is a text, a list of token ids, or a list of either, not empty", "prompt")
        if _is_token_ids(prompt):
            return (tuple(prompt),)
        for index, part in enumerate(prompt):
            if not isinstance(part, str) and not _is_token_ids(part):
                self.refuse("a prompt is a text or a list of token ids", f"prompt[{index}]")
        return tuple(part if isinstance(part, str) else tuple(part) for part in prompt)

    def _params(self, values: Body, logprobs: int | None, default_max_tokens: int | None) -> SamplingParams:
        """SamplingParams from the body, then the run's defaults, then those of the endpoint."""
        if values.n is not None and values.n > MOST_CHOICES:
            self.refuse(f"n must be at most {MOST_CHOICES}, not {values.n}", "n")
        given: dict[str, Any] = {}
        for name in _SAMPLING_NAMES:
            value = getattr(values, name, None)
            if value is None:
                value = getattr(self.defaults, name, None)
            if value is not None:
                given[name] = value
        given.setdefault("max_tokens", default_max_tokens)
        if values.seed is None and self.defaults.seed is not None:
            given["seed"] = mixed_seed(self.defaults.seed, self.custom_id)
        if values.logit_bias:
            given["logit_bias"] = {self._token_id(key): bias for key, bias in values.logit_bias.items()}
        try:
            return SamplingParams(logprobs=logprobs, **given)
        except RequestError as error:
            param = error.param or ""
            if isinstance(values, ChatBody):
                param = "top_logprobs" if param == "logprobs" else param
                if param == "max_tokens" and values.max_completion_tokens is not None:
                    param = "max_completion_tokens"
            self.refuse(str(error), param, code=error.code)

    def _token_id(self, key: str) -> int:
        if not key.isascii() or not key.isdigit() or len(key) > len(str(LARGEST_INTEGER)):
            self.refuse(f"the keys of logit_bias are token ids, not {key!r}", "logit_bias")
        return int(key)


_SAMPLING_NAMES = tuple(SamplingParams.__dataclass_fields__.keys() - {"logprobs", "logit_bias"})


def mixed_seed(seed: int, custom_id: CustomId) -> int:
    """A seed for one line of a seeded run: fixed by both arguments, different from line to line."""
    digest = hashlib.blake2b(f"{seed}/{custom_id!r}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _is_token_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in value)
    )
