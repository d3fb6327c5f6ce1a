"""Telling reasoning, answer and tool calls apart in the text that a model streams.

Pure: text in, pieces out, in any chunks. A tag may be cut anywhere by the stream; what could be the
beginning of one is held back until it is known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Kind = Literal["reasoning", "content", "tool_call"]


@dataclass(frozen=True, slots=True)
class Tag:
    """A stretch of output between `opening` and any of `closings`; without closings it runs to the end."""

    kind: Kind
    opening: str
    closings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TagSet:
    """The tags of one model. `hidden` are marks that belong to no text, like the roles of a channel format.

    `special`: some tags are special tokens, so a client that wants them told apart asks for text with
    skip_special_tokens=False. `stray` are all special tokens then: what the client takes out of the text itself.
    """

    tags: tuple[Tag, ...] = ()
    hidden: tuple[str, ...] = ()
    special: bool = False
    stray: tuple[str, ...] = ()

    @property
    def has_reasoning(self) -> bool:
        return any(tag.kind == "reasoning" for tag in self.tags)

    @property
    def has_tools(self) -> bool:
        return any(tag.kind == "tool_call" for tag in self.tags)


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one kind. A tool call comes as one piece per call, whole; the others as they stream.

    `source` is a tool call as the model wrote it, tags included.
    """

    kind: Kind
    text: str
    source: str = field(default="", compare=False)


def _pair(kind: Kind, opening: str, *closings: str) -> Tag:
    return Tag(kind, opening, closings)


_CHANNELS = TagSet(  # OpenAI's harmony format
    tags=(
        _pair("reasoning", "<|channel|>analysis<|message|>", "<|end|>", "<|return|>"),
        _pair("tool_call", "<|channel|>commentary to=", "<|call|>", "<|end|>", "<|return|>"),
        _pair("tool_call", "<|channel|>analysis to=", "<|call|>", "<|end|>", "<|return|>"),
    ),
    hidden=(
        "<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|start|>assistant",
        "<|end|>", "<|return|>",
    ),
    special=True,
)  # fmt: skip
_KNOWN: tuple[Tag, ...] = (
    _pair("reasoning", "<think>", "</think>"),
    _pair("reasoning", "<longcat_think>", "</longcat_think>"),
    _pair("reasoning", "<seed:think>", "</seed:think>"),
    _pair("reasoning", "[THINK]", "[/THINK]"),
    _pair("reasoning", "<|begin_of_thought|>", "<|end_of_thought|>"),
    _pair("reasoning", "<|channel>thought", "<channel|>"),
    _pair("tool_call", "<tool_call>", "</tool_call>"),
    _pair("tool_call", "<longcat_tool_call>", "</longcat_tool_call>"),
    _pair("tool_call", "<seed:tool_call>", "</seed:tool_call>"),
    _pair("tool_call", "<minimax:tool_call>", "</minimax:tool_call>"),
    _pair("tool_call", "<|tool_call>", "<tool_call|>"),
    _pair("tool_call", "<|tool_call_start|>", "<|tool_call_end|>"),
    _pair("tool_call", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    _pair("tool_call", "<start_function_call>", "<end_function_call>"),
    _pair("tool_call", "[TOOL_CALLS]"),
    _pair("tool_call", "<|python_tag|>"),
)


def detect_tags(template: str | None, added_tokens: Mapping[str, bool] | None = None) -> TagSet:
    """The tags that a model writes.

    Known from its chat template and from `added_tokens`: their texts, and whether each is a special token,
    which skip_special_tokens would drop.
    """
    template = template or ""
    tokens = added_tokens or {}
    if "<|channel|>" in tokens or "<|channel|>analysis" in template:
        return replace(_CHANNELS, stray=_special(tokens))
    found = tuple(tag for tag in _KNOWN if tag.opening in template or tag.opening in tokens)
    marks = [mark for tag in found for mark in (tag.opening, *tag.closings)]
    dropped = _special(tokens)
    special = any(token in mark for mark in marks for token in dropped)
    return TagSet(found, special=special, stray=dropped if special else ())


def _special(tokens: Mapping[str, bool]) -> tuple[str, ...]:
    return tuple(token for token, special in tokens.items() if special and token)


@dataclass(slots=True)
class TagSplitter:
    """Splits one output. `prompt` is the text before it: templates often open the reasoning themselves."""

    tags: TagSet
    prompt: str = ""
    _inside: Tag | None = field(default=None, init=False)
    _held: str = field(default="", init=False)
    _fresh: bool = field(default=False, init=False)  # nothing but white space since the last tag
    _lead: str | None = field(default="", init=False)  # white space before anything else; then None

    def __post_init__(self) -> None:
        for tag in self.tags.tags:
            start = self.prompt.rfind(tag.opening)
            if start >= 0 and not any(closing in self.prompt[start:] for closing in tag.closings):
                ends_with_it = not self.prompt[start + len(tag.opening) :].strip()
                if ends_with_it:
                    self._inside, self._fresh, self._lead = tag, True, None

    def push(self, text: str) -> list[Piece]:
        """The pieces that this text completes."""
        self._held += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return _merged(pieces)

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the output. An unclosed tool call counts as one."""
        pieces: list[Piece] = []
        rest, self._held = self._held, ""
        if self._kind == "tool_call":
            self._put_call(pieces, rest, "")
        else:
            self._put(pieces, rest.rstrip() if self._kind == "reasoning" else rest)
            if self._lead:
                pieces.append(Piece("content", self._lead))
        self._inside, self._lead = None, None
        return pieces

    @property
    def _kind(self) -> Kind:
        return self._inside.kind if self._inside else "content"

    def _advance(self, pieces: list[Piece]) -> bool:
        """Take the next whole mark off what is held, or all text before a possible one. False: wait."""
        marks = self._marks()
        at, mark = _first_mark(self._held, marks)
        if mark is None:
            if self._kind != "tool_call":
                keep = _possible_mark(self._held, marks)
                if self._kind == "reasoning":  # white space before the closing tag belongs to nobody
                    keep = max(keep, len(self._held) - len(self._held[: len(self._held) - keep].rstrip()))
                ready = len(self._held) - keep
                self._put(pieces, self._held[:ready])
                self._held = self._held[ready:]
            return False
        before = self._held[:at]
        if self._kind == "tool_call":
            self._put_call(pieces, before, mark)
        else:
            self._put(pieces, self._trimmed(before))
        self._held = self._held[at + len(mark) :]
        self._inside = marks[mark]
        self._fresh, self._lead = True, None
        return True

    def _marks(self) -> dict[str, Tag | None]:
        """The marks that mean something here, and the tag that each leads into."""
        if self._inside is not None:
            return dict.fromkeys(self._inside.closings)
        marks: dict[str, Tag | None] = dict.fromkeys(self.tags.hidden)
        return marks | {tag.opening: tag for tag in self.tags.tags}

    def _trimmed(self, text: str) -> str:
        return text.rstrip() if self._kind == "reasoning" else text

    def _put_call(self, pieces: list[Piece], text: str, closing: str) -> None:
        opening = self._inside.opening if self._inside else ""
        if text.strip():
            pieces.append(Piece("tool_call", text.strip(), opening + text + closing))

    def _put(self, pieces: list[Piece], text: str) -> None:
        if self._fresh:
            text = text.lstrip()  # templates put line breaks around tags
        if self._lead is not None:  # as they do before the first
            text = self._lead + text
            self._lead = text if not text.strip() else None
            text = "" if self._lead is not None else text
        if text:
            self._fresh = False
            pieces.append(Piece(self._kind, text))


def _first_mark(text: str, marks: Collection[str]) -> tuple[int, str | None]:
    """The earliest mark in a text, the longest of those that start there."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    if not found:
        return -1, None
    at, _, mark = min(found)
    return at, mark


def _possible_mark(text: str, marks: Collection[str]) -> int:
    """How many characters at the end of a text could be the beginning of a mark."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(mark.startswith(tail) for mark in marks):
            return length
    return 0


def _merged(pieces: list[Piece]) -> list[Piece]:
    merged: list[Piece] = []
    for piece in pieces:
        if merged and merged[-1].kind == piece.kind != "tool_call":
            merged[-1] = Piece(piece.kind, merged[-1].text + piece.text)
        else:
            merged.append(piece)
    return merged
