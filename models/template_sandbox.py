"""A jinja2 environment for templates from strangers: no reach for attributes, bounded time and memory.

jinja2's own sandbox keeps a template away from Python's internals, but lets it loop for ever or build a
string of any size. Here every loop iteration, call, filter and operator spends from a budget, and what
could grow large is measured before it is built. Nothing that a chat template needs is missing.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

MAX_SOURCE = 1 << 20
MAX_TEXT = 1 << 23  # characters in one piece, and in everything that one rendering puts out
MAX_ITEMS = 1 << 19  # in one nested value, what is shared counted each time it is reached
MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0
_MAX_NUMBER = 1 << 64
_MAX_WIDTH = 10_000

# fmt: off
_TEXT_METHODS = frozenset([
    "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower", "isnumeric",
    "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
    "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
    "swapcase", "title", "upper",
])
_FILTERS = frozenset([
    "abs", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "format",
    "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject",
    "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string", "sum",
    "title", "trim", "unique", "upper",
])
_MEASURED_FILTERS = frozenset([
    "e", "escape", "format", "indent", "join", "replace", "string", "title", "trim", "upper", "lower", "capitalize",
])
# fmt: on
_WIDE_FORMAT = re.compile(r"\{[^{}]*:[^{}]*(\{|\d{4})")  # in str.format: a width from a field, or a large one
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\*|\d{4})")


class TemplateLimit(SecurityError):
    """The template asks for more time or memory than any chat template needs."""


class Budget:
    """What one rendering may still spend."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deadline = clock() + MAX_SECONDS
        self._steps = MAX_STEPS
        self._text = MAX_TEXT

    def step(self, count: int = 1) -> None:
        self._steps -= count
        if self._steps < 0 or self._clock() > self._deadline:
            raise TemplateLimit("it takes too many steps")

    def emit(self, text: str) -> str:
        self.step()
        self._text -= len(text)
        if self._text < 0:
            raise TemplateLimit(f"it puts out more than {MAX_TEXT} characters")
        return text


def measure(*values: Any) -> int:
    """Characters in nested values, and one for every item.

    Raises TemplateLimit past MAX_TEXT and MAX_ITEMS, before anything of that size is built.
    """
    size = items = 0
    rest = list(values)
    while rest:
        value = rest.pop()
        items += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            rest.extend(value.keys())
            rest.extend(value.values())
        elif isinstance(value, Sequence) and not isinstance(value, range):
            rest.extend(value)
        if size > MAX_TEXT or items + len(rest) > MAX_ITEMS:
            raise TemplateLimit(f"it builds something larger than {MAX_TEXT} characters or {MAX_ITEMS} items")
    return size + items


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """`render` runs a template compiled by `compile_source` within a fresh budget."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag], finalize=self._emit
        )
        self._clock = clock
        self._budget: ContextVar[Budget] = ContextVar("template_budget")
        self.filters = {name: self._bounded(name, self.filters[name]) for name in _FILTERS}
        self.filters |= {
            "tojson": self._to_json,
            "bounded_loop": self._bounded_loop,
            "bounded_text": self._bounded_text,
            "bounded_value": self._bounded_value,
        }
        kept = {name: self.globals[name] for name in ("range", "dict", "namespace")}
        self.globals = {**kept, "raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def compile_source(self, source: str) -> Template:
        """Raises jinja2.TemplateError, and RecursionError for absurd nesting."""
        if len(source) > MAX_SOURCE:
            raise TemplateLimit(f"it is longer than {MAX_SOURCE} characters")
        self._budget.set(Budget(self._clock))  # constant parts are computed while compiling
        return self.from_string(source)

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        self._budget.set(Budget(self._clock))
        return template.render(variables)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            if loop.recursive:
                raise TemplateLimit("it has a recursive loop")
            loop.iter = _filtered("bounded_loop", loop.iter)
        _bound(tree)
        return tree

    def _bounded_loop(self, items: Iterable[Any]) -> Iterable[Any]:
        if isinstance(items, Undefined):
            return items
        counted = (self._counted(item) for item in items)
        # A list keeps its length: `loop.last` and `loop.length` need it.
        return list(counted) if isinstance(items, Sequence) else counted

    def _counted(self, item: Any) -> Any:
        self._budget.get().step()
        return item

    def _bounded_text(self, parts: Sequence[Any]) -> str:
        self._budget.get().step()
        measure(parts)
        return "".join(str(part) for part in parts)

    def _bounded_value(self, value: Any) -> Any:
        self._budget.get().step()
        measure(value)
        return value

    def _emit(self, value: Any) -> Any:
        if not isinstance(value, (str, int, float, Undefined)) and value is not None:
            measure(value)
        return self._budget.get().emit(str(value))

    def _to_json(self, value: Any, indent: int | None = None, **options: Any) -> str:
        # Unlike jinja's own, this escapes no HTML characters: models were trained on plain JSON.
        self._budget.get().step(measure(value) // 16 + 1)
        options = {"ensure_ascii": False} | {key: options[key] for key in _JSON_OPTIONS & options.keys()}
        return json.dumps(value, indent=min(indent, 16) if isinstance(indent, int) else indent, **options)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # keeps the marks that say which context a filter wants
        def bounded(*arguments: Any, **options: Any) -> Any:
            self._budget.get().step()
            values = [*arguments, *options.values()]
            if any(isinstance(value, int) and value > _MAX_WIDTH for value in values) and name in _WIDE_FILTERS:
                raise TemplateLimit(f"it asks {name} for more than {_MAX_WIDTH}")
            plain = [value for value in values if not isinstance(value, (Context, BoundedEnvironment))]
            if name in _MEASURED_FILTERS:
                _check_text_call(name, plain)
            result = function(*arguments, **options)
            return map(self._counted, result) if isinstance(result, Iterator) else result

        return bounded

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _TEXT_METHODS
        if isinstance(obj, (int, float, bytes)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"it reaches for the attribute {attribute!r} of a {type(obj).__name__}")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._budget.get().step()
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_text_call(method.__name__, [owner, *args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._budget.get().step()
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            if operator == "**" and (abs(right) > 64 or abs(left) > _MAX_NUMBER):
                raise TemplateLimit("it computes too large a number")
            if abs(left) > _MAX_NUMBER or abs(right) > _MAX_NUMBER:
                raise TemplateLimit("it computes with too large a number")
        elif operator == "*":
            count, repeated = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(count, int) and measure(repeated) * count > MAX_TEXT:
                raise TemplateLimit(f"it repeats something {count} times")
        elif operator == "%" and isinstance(left, str):
            _check_text_call("%", [left, right])
        else:
            measure(left, right)
        return super().call_binop(context, operator, left, right)


_JSON_OPTIONS = frozenset({"ensure_ascii", "separators", "sort_keys"})
_WIDE_FILTERS = frozenset({"indent", "batch", "slice", "round"})


def _check_text_call(name: str, values: list[Any]) -> None:
    """Refuse a text method or filter whose result would be far larger than what goes in."""
    size = measure(values)
    text = values[0] if values and isinstance(values[0], str) else ""
    if name in ("format", "format_map") and (_WIDE_FORMAT.search(text) or _WIDE_PERCENT.search(text)):
        raise TemplateLimit("it formats with a large width")
    if name == "%" and _WIDE_PERCENT.search(text):
        raise TemplateLimit("it formats with a large width")
    if name == "format":
        size *= 1 + text.count("{") + text.count("%")
    if name == "replace" and len(values) > 2:
        old, new = str(values[1]), str(values[2])
        size += text.count(old) * len(new)
    if name == "join":
        separators = [value for value in values if isinstance(value, str)]
        items = max((len(value) for value in values if isinstance(value, Sequence)), default=0)
        size += items * sum(map(len, separators[:1]))
    if size > MAX_TEXT:
        raise TemplateLimit(f"it builds a text of more than {MAX_TEXT} characters")


def _filtered(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _bound(node: nodes.Node) -> nodes.Node:
    """Send `~`, and the lists and mappings that a template writes, through the budget."""
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, name, _bound(value))
        elif isinstance(value, list):
            value[:] = [_bound(item) if isinstance(item, nodes.Node) else item for item in value]
    if isinstance(node, nodes.Concat):
        return _filtered("bounded_text", nodes.List(node.nodes, lineno=node.lineno))
    if isinstance(node, (nodes.List, nodes.Dict)) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        return _filtered("bounded_value", node)
    return node


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; for us it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 64 or re.search(r"%[^a-zA-Z%-]", pattern):
        raise TemplateLimit("it asks for a date in an odd format")
    return datetime.datetime.now().strftime(pattern)
