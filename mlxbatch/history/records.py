"""The rows of the history file as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

Role = Literal["user", "assistant"]
Status = Literal["streaming", "complete", "length", "stopped", "interrupted", "error"]
STATUSES: tuple[str, ...] = get_args(Status)


@dataclass(frozen=True, slots=True)
class Attachment:
    """A text file that was put into a prompt. The text is kept, since the file may change."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """What the engine counted for one answer. Times are seconds; None until known."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    reasoning_seconds: float | None = None
    ttft: float | None = None
    tokens_per_second: float | None = None


@dataclass(slots=True)
class MessageRecord:
    """One turn. `parent` is the turn that it follows; turns with one parent are versions of each other.

    `dropped` counts the oldest turns that no longer fitted the context when the answer was generated.
    """

    id: int
    chat: int
    parent: int | None
    role: Role
    content: str
    created: float
    status: Status = "complete"
    reasoning: str = ""
    attachments: tuple[Attachment, ...] = ()
    model: str = ""
    dropped: int = 0
    note: str = ""
    figures: AnswerFigures = field(default_factory=AnswerFigures)


@dataclass(slots=True)
class ChatRecord:
    """One conversation. `leaf` is the last turn of the version on show; `sampling` holds the parameters
    that differ from the defaults."""

    id: int
    title: str
    created: float
    updated: float
    model: str = ""
    system_prompt: str = ""
    sampling: dict[str, object] = field(default_factory=dict)
    draft: str = ""
    leaf: int | None = None


@dataclass(frozen=True, slots=True)
class ChatSummary:
    """A line of the history list."""

    id: int
    title: str
    updated: float
    turns: int


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A turn that matches a search. In `snippet` the matches stand between \\x02 and \\x03."""

    chat: int
    title: str
    message: int
    role: Role
    created: float
    snippet: str
