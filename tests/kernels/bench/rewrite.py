"""Turns Metal source into what clang accepts as C++ for OpenCL. Line numbers are kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import count

from .tokens import CLOSING, Token, closing, closing_angle, lex, neighbour, text_of


@lru_cache(maxsize=256)
def rewrite(source: str) -> str:
    """`source` without attributes, with threadgroup variables in the runtime's memory; see each step below."""
    # A pointer variable in thread memory may say so in Metal: "thread const device T* p".
    source = re.sub(r"\bthread\s+(const\s+)?(?=(device|constant|threadgroup)\b)", r"\1", source)
    tokens = _drop_attributes(lex(source))
    tokens = _place_threadgroup_variables(tokens)
    tokens = _drop_thread_of_constructors(tokens)
    return text_of(_copy_conditional_operands(tokens))


def _newlines(tokens: list[Token]) -> Token:
    return Token("space", "\n" * text_of(tokens).count("\n"))


def _drop_attributes(tokens: list[Token]) -> list[Token]:
    """[[...]] means nothing to the bench: the signature's attributes are known from signature.py."""
    out: list[Token] = []
    i = 0
    while i < len(tokens):
        if tokens[i].text == "[" and i + 1 < len(tokens) and tokens[i + 1].text == "[":
            end = closing(tokens, i)
            out.append(_newlines(tokens[i : end + 1]))
            i = end + 1
        else:
            out.append(tokens[i])
            i += 1
    return out


def _place_threadgroup_variables(tokens: list[Token]) -> list[Token]:
    """threadgroup T x[N];  becomes a reference into the runtime's threadgroup memory."""
    out: list[Token] = []
    keys = count(1)
    i = 0
    while i < len(tokens):
        declaration = threadgroup_declaration(tokens, i) if tokens[i].text == "threadgroup" else None
        if declaration is None:
            out.append(tokens[i])
            i += 1
            continue
        end, kind, declarators = declaration
        for name, dimensions in declarators:
            out.append(
                Token(
                    "raw",
                    f"typedef {kind} bench_type_{name}{dimensions}; threadgroup bench_type_{name}& {name} = "
                    f"*(threadgroup bench_type_{name}*)bench_threadgroup_variable(sizeof(bench_type_{name}), "
                    f'__alignof__(bench_type_{name}), __FILE__, __LINE__, "{name}", {next(keys)}); ',
                )
            )
        out.append(_newlines(tokens[i : end + 1]))
        i = end + 1
    return out


def threadgroup_declaration(tokens: Sequence[Token], i: int) -> tuple[int, str, list[tuple[str, str]]] | None:
    """(index of the ;, type, [(name, dimensions)]) of the variable declaration at i; None if it is none,
    for example the declaration of a pointer or of a parameter."""
    before = neighbour(tokens, i, -1)
    if before >= 0 and tokens[before].text not in (";", "{", "}", ":", ")"):
        return None
    kind: list[Token] = []
    name_at = -1
    j = neighbour(tokens, i)
    while j < len(tokens) and tokens[j].text not in ("[", ";", ",", "="):
        token = tokens[j]
        if token.text == "<":
            end = closing_angle(tokens, j)
            if end is None:
                return None
            kind += tokens[j : end + 1]
            j = neighbour(tokens, end)
        elif token.text == "alignas":
            end = closing(tokens, neighbour(tokens, j))
            kind += tokens[j : end + 1]
            j = neighbour(tokens, end)
        elif token.kind == "word" or token.text == "::":
            name_at = j
            kind += [token, Token("space", " ")]
            j = neighbour(tokens, j)
        else:
            return None
    if name_at < 0 or tokens[name_at].kind != "word":
        return None
    kind = kind[:-2]  # without the first declarator's name
    declarators: list[tuple[str, str]] = []
    current: list[Token] = []
    j = name_at
    while j < len(tokens):
        text = tokens[j].text
        if text == "[":
            end = closing(tokens, j)
            current += tokens[j : end + 1]
            j = end
        elif text in (",", ";"):
            match = re.match(r"(\w+)\s*(.*)$", text_of(current).strip(), re.S)
            if match is None:
                return None
            declarators.append((match.group(1), match.group(2)))
            current = []
            if text == ";":
                return j, text_of(kind).strip(), declarators
        elif text == "=":  # Metal ignores the initialiser: the contents stay undefined
            j = neighbour(tokens, j)
            if tokens[j].text == "{":
                j = closing(tokens, j)
        else:
            current.append(tokens[j])
        j += 1
    return None


def _drop_thread_of_constructors(tokens: list[Token]) -> list[Token]:
    """S(...) thread : ...  In clang a temporary has no address space, so such a constructor never matches."""
    classes = {
        tokens[j].text
        for i, token in enumerate(tokens)
        if token.text in ("struct", "class") and (j := neighbour(tokens, i)) < len(tokens)
    }
    out = list(tokens)
    for i, token in enumerate(tokens):
        if token.kind != "word" or token.text not in classes:
            continue
        opening, before = neighbour(tokens, i), neighbour(tokens, i, -1)
        if opening >= len(tokens) or tokens[opening].text != "(":
            continue
        if before >= 0 and tokens[before].text in ("return", "=", ",", "("):
            continue
        after = neighbour(tokens, closing(tokens, opening))
        if after < len(tokens) and tokens[after].text == "thread":
            out[after] = Token("space", "")
    return out


def _copy_conditional_operands(tokens: list[Token]) -> list[Token]:
    """c ? A : B  becomes  c ? bench::operand(A) : bench::operand(B); the reason is at operand in vectors.h."""
    insert: dict[int, list[str]] = {}
    for i, token in enumerate(tokens):
        if token.text != "?" or token.kind != "operator":
            continue
        colon = _operand_end(tokens, i + 1)
        if colon >= len(tokens) or tokens[colon].text != ":":
            continue
        end = _operand_end(tokens, colon + 1)
        if any(t.kind == "directive" for t in tokens[i:end]):
            continue
        for start, stop in ((i + 1, colon), (colon + 1, end)):
            insert.setdefault(start, []).append(" bench::operand(")
            insert.setdefault(stop, []).insert(0, ")")
    out: list[Token] = []
    for i, token in enumerate(tokens):
        out += [Token("raw", text) for text in insert.get(i, ())]
        out.append(token)
    return out


def _operand_end(tokens: list[Token], i: int) -> int:
    nested = 0
    while i < len(tokens):
        text = tokens[i].text
        if text in CLOSING:
            i = closing(tokens, i) + 1
            continue
        if text in (")", "]", "}", ";", ","):
            return i
        if text == "<" and tokens[neighbour(tokens, i, -1)].kind == "word":
            end = closing_angle(tokens, i)
            after = neighbour(tokens, end) if end is not None else len(tokens)
            if end is not None and after < len(tokens) and tokens[after].text in ("(", "{", "::"):
                i = end + 1
                continue
        if text == "?":
            nested += 1
        elif text == ":":
            if nested == 0:
                return i
            nested -= 1
        i += 1
    return i
