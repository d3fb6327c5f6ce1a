"""Rendering the chat template that comes with a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from jinja2 import Template, TemplateError

from mlxbatch.errors import RequestError
from mlxbatch.models.template_sandbox import BoundedEnvironment


class ChatTemplate:
    """One template, compiled when it is first used: a model with a broken one still completes plain text.

    `special_tokens` (bos_token, eos_token ...) are visible to it as variables.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        environment: BoundedEnvironment | None = None,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._environment = environment or BoundedEnvironment()

    @cached_property
    def _template(self) -> Template:
        return self._environment.compile_source(self.source)

    def render(self, messages: list[dict[str, object]], /, **arguments: object) -> str:
        """The prompt text, generation prompt added unless told not to.

        Raises RequestError when the template refuses the messages, or does what no template should.
        """
        variables: dict[str, object] = {
            **self._special_tokens,
            "tools": None,  # absent is not the same as None to a template
            "documents": None,
            "add_generation_prompt": True,
            **arguments,
            "messages": messages,
        }
        try:
            return self._environment.render(self._template, variables)
        except TemplateError as error:
            reason = error.message or type(error).__name__
        except RecursionError:
            reason = "it is nested too deeply"
        except Exception as error:  # anything a template can provoke: it is somebody else's code
            reason = f"{type(error).__name__}: {error}"
        raise RequestError(
            f"the model's chat template cannot render these messages: {reason}",
            code="chat_template_error",
            param="messages",
        )
