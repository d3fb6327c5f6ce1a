"""Rendering the chat template that comes with a model. Templates are code from strangers: see `_Sandbox`."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlxbatch.errors import RequestError


class ChatTemplate:
    """One compiled template. `special_tokens` (bos_token, eos_token ...) are visible to it as variables."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise RequestError(f"the model's chat template is broken: {error}", code="chat_template_error") from None

    def render(self, messages: list[dict[str, object]], **arguments: object) -> str:
        """The prompt text. Raises RequestError when the template refuses the messages."""
        variables: dict[str, object] = {**self._special_tokens, "add_generation_prompt": True, **arguments}
        try:
            return self._template.render(messages=messages, **variables)
        except Exception as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}",
                code="chat_template_error",
                param="messages",
            ) from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML characters, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
