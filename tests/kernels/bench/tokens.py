"""A small lexer for Metal source: enough to find declarations, and never to look inside comments or strings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import SourceRejected

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<directive>(?:(?<=\n)|\A)\#(?:[^\n\\]|\\.|\\\n)*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<word>[A-Za-z_]\w*)
    |(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
    |(?P<operator>::|->|<<=|>>=|\+\+|--|&&|\|\||[-+*/%&|^!=<>]=|.)""",
    re.S | re.X,
)
CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Token:
    kind: str  # space (comments too), directive, string, word, number, operator, or raw for inserted text
    text: str

    @property
    def blank(self) -> bool:
        return self.kind in ("space", "directive")


def lex(source: str) -> list[Token]:
    return [Token(str(match.lastgroup), match.group()) for match in _TOKEN.finditer(source)]


def text_of(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)


def neighbour(tokens: Sequence[Token], i: int, step: int = 1) -> int:
    """Index of the next (or previous) token that is neither space nor a directive; may fall off the end."""
    i += step
    while 0 <= i < len(tokens) and tokens[i].blank:
        i += step
    return i


def closing(tokens: Sequence[Token], i: int) -> int:
    """Index of the bracket that closes the one at i."""
    opened, depth = tokens[i].text, 0
    for j in range(i, len(tokens)):
        if tokens[j].text == opened:
            depth += 1
        elif tokens[j].text == CLOSING[opened]:
            depth -= 1
            if depth == 0:
                return j
    raise SourceRejected(f"unbalanced {opened!r} in the kernel's source")


def closing_angle(tokens: Sequence[Token], i: int) -> int | None:
    """Index of the > that closes a template argument list, or None when the < at i was a comparison."""
    depth, j = 0, i
    while j < len(tokens):
        text = tokens[j].text
        if text == "<":
            depth += 1
        elif text == ">":
            depth -= 1
            if depth == 0:
                return j
        elif text == ">>":
            depth -= 2
        elif text in CLOSING:
            j = closing(tokens, j)
        elif text in (";", "{", "}", ")", "]"):
            return None
        j += 1
    return None
