"""What one line of an input file asks for, or why it cannot be asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mlxbatch.request import SamplingParams

CustomId = str | int


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One valid line. A chat has `messages`; a completion has one or more `prompts`, texts or token ids.

    `named_model` is the model that the line names; the run's own model answers whatever it says.
    `skip_special_tokens` is what the line says of it, if anything.
    """

    line: int
    custom_id: CustomId
    params: SamplingParams
    messages: list[dict[str, Any]] | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    template_args: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] | None = None
    named_model: str | None = None
    skip_special_tokens: bool | None = None

    @property
    def is_chat(self) -> bool:
        return self.messages is not None

    @property
    def answers(self) -> int:
        """How many answers the line asks for, over all its prompts."""
        return self.params.n * max(1, len(self.prompts))


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """Parameters for lines that do not name them. None: the usual default of the endpoint.

    `seed` is mixed with each line's custom_id, so that two lines with the same prompt still differ; a seed
    that a line itself names is used as it stands.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    system: str | None = None


class LineError(Exception):
    """A line that cannot become a request. Becomes an error record; it never ends the run.

    `path` is the JSON path of the culprit in the line, `param` the same relative to the request body.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_request",
        path: str | None = None,
        param: str | None = None,
        custom_id: CustomId | None = None,
    ) -> None:
        super().__init__(f"{message}, at {path}" if path else message)
        self.code = code
        self.param = param
        self.custom_id = custom_id


BatchFormat = Literal["openai", "messages", "text"]
