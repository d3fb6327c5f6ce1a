"""The constructs that Apple's Metal compiler rejects, and MLX's traps around it: RULES is the one list.

Apple's compiler is not available here. The list follows the restrictions of the Metal Shading Language Specification
(section 1.5.4 and the chapters on types and address spaces) and diagnostics that users of it have posted. Every rule
carries an example; a test plants each and expects it to be rejected at its line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .compile import Compiler
from .errors import SourceRejected
from .rewrite import threadgroup_declaration
from .signature import ATTRIBUTES, METADATA, Signature
from .symbols import Location, own_file
from .tokens import Token, closing, lex, neighbour

MAX_BUFFERS = 31

# Finds a construct in tokens: the indices where it begins.
Detector = Callable[[Sequence[Token]], Iterator[int]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A construct. Without a detector it is clang (through the shim's types) that rejects it."""

    construct: str
    reason: str
    example: str  # in a function's body, or in the header when `at_program_scope`
    detector: Detector | None = None
    at_program_scope: bool = False
    in_syntax_tree: bool = False


def _words(*words: str) -> Detector:
    def detect(tokens: Sequence[Token]) -> Iterator[int]:
        return (i for i, token in enumerate(tokens) if token.kind == "word" and token.text in words)

    return detect


def _long_long(tokens: Sequence[Token]) -> Iterator[int]:
    for i, token in enumerate(tokens):
        after = neighbour(tokens, i)
        if token.text == "long" and after < len(tokens) and tokens[after].text in ("long", "double"):
            yield i


def _lambda(tokens: Sequence[Token]) -> Iterator[int]:
    for i, token in enumerate(tokens):
        if token.text != "[" or tokens[neighbour(tokens, i)].text == "[":
            continue
        before = neighbour(tokens, i, -1)
        subscript = before >= 0 and (tokens[before].kind == "word" or tokens[before].text in ("]", ")", "[", "}"))
        if not subscript or tokens[before].text == "return":
            yield i


def _derived_class(tokens: Sequence[Token]) -> Iterator[int]:
    for i, token in enumerate(tokens):
        before = neighbour(tokens, i, -1)
        if token.text not in ("struct", "class") or (before >= 0 and tokens[before].text == "enum"):
            continue
        name = neighbour(tokens, i)
        colon = neighbour(tokens, name)
        if colon < len(tokens) and tokens[colon].text == ":":
            yield i


def _threadgroup_variable(tokens: Sequence[Token]) -> Iterator[int]:
    for i, token in enumerate(tokens):
        if token.text == "threadgroup" and threadgroup_declaration(tokens, i):
            yield i


def _memory_order(tokens: Sequence[Token]) -> Iterator[int]:
    fenced: set[int] = set()
    for i, token in enumerate(tokens):
        if token.text == "atomic_thread_fence":
            fenced.update(range(i, closing(tokens, neighbour(tokens, i))))
        if re.fullmatch(r"memory_order_(acquire|release|acq_rel|seq_cst)", token.text) and i not in fenced:
            yield i


UNQUALIFIED = "pointer type must have explicit address space qualifier"

RULES = (
    Rule(
        "pointer or reference without an address space",
        UNQUALIFIED,
        "float value = 1; float* p = &value; out[0] = *p;",
        in_syntax_tree=True,
    ),
    Rule(
        "pointer parameter without an address space",
        UNQUALIFIED,
        "inline float first(const float* p) { return p[0]; }",
        at_program_scope=True,
        in_syntax_tree=True,
    ),
    Rule(
        "reference parameter of a template without an address space",
        UNQUALIFIED.replace("pointer", "reference"),
        "template <typename T> void grow(T& x) { x += 1; }",
        at_program_scope=True,
        in_syntax_tree=True,
    ),
    Rule(
        "cast to a pointer without an address space",
        UNQUALIFIED,
        "out[0] = *(const float*)(x + 1);",
        in_syntax_tree=True,
    ),
    Rule("pointer into another address space", "address spaces differ", "device float* p = shared; out[0] = *p;"),
    Rule(
        "cast into another address space",
        "address spaces differ",
        "threadgroup float* p = (threadgroup float*)x; out[0] = *p;",
    ),
    Rule("write through a const input", "inputs are const", "x[0] = 1.0f;"),
    Rule("double", "Metal has no double", "double y = 1.0; out[0] = y;"),
    Rule("long long and long double", "Metal has neither", "long long y = 1; out[0] = y;", _long_long),
    Rule("global variable", "program scope variables are constant", "int counter = 0;", at_program_scope=True),
    Rule(
        "constexpr at program scope without constant",
        "program scope variables are constant",
        "constexpr float table[2] = {1, 2};",
        at_program_scope=True,
    ),
    Rule("static local variable", "only constant ones exist", "static int calls; out[0] = calls++;"),
    Rule(
        "threadgroup variable outside the kernel",
        "threadgroup variables are declared in the kernel's own body",
        "inline void f(device float* o) { threadgroup float s[4]; s[0] = o[0]; }",
        _threadgroup_variable,
        at_program_scope=True,
    ),
    Rule("array of variable length", "lengths are constant", "int n = int(x[0]); float a[n]; out[0] = a[0];"),
    Rule(
        "lambda expression",
        "Metal 3.2 and later only; write a function in the header",
        "auto twice = [](float v) { return 2 * v; }; out[0] = twice(x[0]);",
        _lambda,
    ),
    Rule("goto", "not in Metal", "int i = 0; again: i++; if (i < 3) goto again; out[0] = i;", _words("goto")),
    Rule("inline assembly", "not in Metal", 'asm("nop");', _words("asm", "__asm", "__asm__")),
    Rule("exceptions", "not in Metal", "try { out[0] = 1; } catch (...) {}", _words("try", "catch", "throw")),
    Rule("new and delete", "not in Metal", "thread int* p = new int; out[0] = *p;", _words("new", "delete")),
    Rule(
        "virtual functions",
        "not in Metal",
        "struct S { virtual void f() {} };",
        _words("virtual"),
        at_program_scope=True,
    ),
    Rule(
        "derived class",
        "not in Metal",
        "struct A { int a; }; struct B : A { int b; };",
        _derived_class,
        at_program_scope=True,
    ),
    Rule("type information", "not in Metal", "out[0] = sizeof(typeid(x));", _words("typeid", "dynamic_cast")),
    Rule(
        "register, thread_local, noexcept",
        "not in Metal",
        "inline void f() noexcept {}",
        _words("register", "thread_local", "noexcept"),
        at_program_scope=True,
    ),
    Rule("function pointer", "needs visible functions", "typedef float (*function)(float);", at_program_scope=True),
    Rule("bit-field", "not in Metal", "struct S { int a : 3; };", at_program_scope=True),
    Rule("C++ standard library", "Metal has its own", "out[0] = std::max(x[0], 1.0f);"),
    Rule("standard headers", "Metal has its own", "#include <cmath>", at_program_scope=True),
    Rule("ambiguous max or min", "both arguments have one type", "out[0] = max(x[0], 0);"),
    Rule("bfloat from float", "narrowing is explicit", "bfloat b = 1.0f; out[0] = b;"),
    Rule("conversion between vectors", "conversions are explicit", "half4 h = half4(1); float4 f = h; out[0] = f.x;"),
    Rule("vector as a condition", "use all() or any()", "float4 a = 1, b = 2; if (a == b) out[0] = 1;"),
    Rule("simdgroup function of 64 bits", "16 and 32 bits only", "out[0] = simd_sum(long(x[0]));"),
    Rule("simdgroup function of bool", "numbers only", "out[0] = simd_sum(x[0] > 0);"),
    Rule("as_type of another size", "sizes are equal", "half h = 1; out[0] = as_type<float>(h);"),
    Rule(
        "atomic of a type without one",
        "int, uint, float and some of ulong",
        "atomic_fetch_add_explicit((device atomic<half>*)out, 1.0h, memory_order_relaxed);",
    ),
    Rule(
        "atomic maximum of float",
        "float has no atomic maximum",
        "atomic_fetch_max_explicit((device atomic<float>*)out, 1.0f, memory_order_relaxed);",
    ),
    Rule(
        "memory order of an atomic",
        "atomics are relaxed; order with a barrier or a fence",
        "atomic_fetch_add_explicit((device atomic_int*)out, 1, memory_order_seq_cst);",
        _memory_order,
    ),
)  # fmt: skip


class Lint:
    """Checks sources, each once: variants of a template have the same syntax tree but for their types."""

    def __init__(self, compiler: Compiler):
        self._compiler = compiler
        self._clean: set[tuple[str, str]] = set()

    def check(self, name: str, made: Signature) -> None:
        """Raises SourceRejected with every place where the source breaks a rule."""
        source = (made.header, made.source)
        if source not in self._clean:
            _check_source(self._compiler, name, made)
            self._clean.add(source)
        _reject(_mlx_traps(name, made))


def _reject(found: Iterable[tuple[Location, str]]) -> None:
    lines = [f"{place}: error: {text}" for place, text in dict.fromkeys(found)]
    if lines:
        raise SourceRejected("\n".join(lines))


def _check_source(compiler: Compiler, name: str, made: Signature) -> None:
    _reject([*_broken_rules(made.header, f"{name} (header)", True), *_broken_rules(made.source, name, False)])
    # A source that clang cannot parse has no tree, and clang says why.
    _reject(unqualified_pointers(compiler.syntax_tree(name, made)))


def _broken_rules(source: str, file: str, program_scope: bool) -> Iterator[tuple[Location, str]]:
    tokens = lex(source)
    for rule in RULES:
        if rule.detector is None or (rule.detector is _threadgroup_variable and not program_scope):
            continue
        text = f"{rule.construct}: {rule.reason}"
        yield from ((_location(tokens, i, file), text) for i in rule.detector(tokens))


def _location(tokens: Sequence[Token], i: int, file: str) -> Location:
    """The line of token i, as #line directives have it."""
    line = 1
    for token in tokens[:i]:
        directive = (
            re.match(r'\s*#\s*line\s+(\d+)(?:\s+"([^"]*)")?', token.text) if token.kind == "directive" else None
        )
        if directive:
            line = int(directive.group(1)) - 1
            file = directive.group(2) or file
        line += token.text.count("\n")
    return Location(file, line)


def _mlx_traps(name: str, made: Signature) -> Iterator[tuple[Location, str]]:
    """MLX looks for its names anywhere in the body, inside longer words too: each hit adds an argument."""
    place = Location(f"{name} (signature)", 1)
    words = {token.text for token in lex(made.source) if token.kind == "word"}
    for buffer in made.buffers:
        if buffer.part in METADATA and buffer.name not in words:
            longer = sorted(word for word in words if buffer.name in word) or ["a comment"]
            yield place, f"MLX adds the argument {buffer.name} because the source has {longer[0]}: rename one of them"
    for attribute in made.attributes:
        if not any(attribute in word for word in words if word in ATTRIBUTES):
            longer = sorted(word for word in words if attribute in word) or ["a comment"]
            yield place, f"MLX adds the argument {attribute} because the source has {longer[0]}: rename it"
    if len(made.buffers) > MAX_BUFFERS:
        yield place, f"{len(made.buffers)} buffers; Metal has {MAX_BUFFERS}"


_DECLARATION = re.compile(
    r"\b(ParmVarDecl|VarDecl|FieldDecl|TypedefDecl|TypeAliasDecl|CStyleCastExpr|CXX\w+CastExpr)\b"
)
_QUALIFIED = re.compile(r"__(private|global|local|constant)\b")


def unqualified_pointers(tree: str) -> Iterator[tuple[Location, str]]:
    """Pointers and references without an address space, from clang's dump of the syntax tree. Metal 4.1 makes them
    generic, as OpenCL does; earlier versions reject them."""
    file, line = "", 0
    implicit_depth: int | None = None  # of a member function that the compiler makes, whose parameters are generic
    for text in tree.splitlines():
        depth = len(text) - len(text.lstrip(" |`-"))
        if implicit_depth is not None and depth <= implicit_depth:
            implicit_depth = None
        if implicit_depth is None and re.search(r"CXX(Constructor|Method)Decl .* implicit ", text):
            implicit_depth = depth
        head = re.search(r"<([^<>]*)>(?: ([^'\"<>]*?\d+:\d+|col:\d+)(?= |$))?", text)
        if head is None:
            continue
        for part in (*head.group(1).split(", "), head.group(2) or ""):
            place = re.fullmatch(r"(?:(.*):)?(\d+):\d+", part.removeprefix("line:"))
            if place:
                file, line = place.group(1) or file, int(place.group(2))
        if implicit_depth is not None or not _DECLARATION.search(text) or own_file(file):
            continue
        kind = re.search(r"'([^']*)'", text[head.end() :])
        if kind and _unqualified(kind.group(1)):
            what = "reference" if "&" in kind.group(1) and "*" not in kind.group(1) else "pointer"
            yield Location(file, line), UNQUALIFIED.replace("pointer", what)


def _unqualified(kind: str) -> bool:
    """True when something before a * or & in this type has no address space: 'const __generic float *__private'."""
    kind = re.sub(r"\[[^]]*\]", "", kind)  # an array's length may be a product
    if "lambda" in kind or "auto" in kind or "(" in kind.split("*")[0].split("&")[0]:
        return False
    pieces = re.split(r"[*&]+", kind)[:-1]
    return any("__generic" in piece or not _QUALIFIED.search(piece) for piece in pieces)
