"""Removes each single barrier of the Metal kernels in turn, and tells which removals no check notices.

    python tests/kernels/mutate.py test_mutation:run

runs `run(factory, file)` of tests/kernels/test_mutation.py once per barrier: `factory` stands for
`mx.fast.metal_kernel` and leaves the barrier out; `file` is the .metal file it is in, to choose cases by.
`run` raises when a check fails, which it should. Kernels say where their lines come from by `#line` directives.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import Bench, MetalKernel
from bench.tokens import Token, closing, lex, neighbour, text_of

BARRIERS = ("threadgroup_barrier", "simdgroup_barrier")
KERNELS = Path(__file__).resolve().parents[2] / "metal_kernels"

Factory = Callable[..., MetalKernel]
# Takes the stand-in for mx.fast.metal_kernel and the file's name, and raises when a check fails.
CaseRunner = Callable[[Factory, str], None]


@dataclass(frozen=True, slots=True)
class Barrier:
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def barriers(source: str, file: str = "") -> list[Barrier]:
    """The barrier calls in Metal source; `file` holds until the first #line directive that names another."""
    return [barrier for barrier, _, _ in _calls(lex(source), file)]


def without(source: str, barrier: Barrier) -> str:
    """`source` with the call of this barrier taken out, if it has it; lines keep their numbers."""
    tokens = lex(source)
    for found, start, end in _calls(tokens, barrier.file):
        if found == barrier:
            return text_of(
                [*tokens[:start], Token("space", "\n" * text_of(tokens[start:end]).count("\n")), *tokens[end:]]
            )
    return source


def _calls(tokens: list[Token], file: str) -> Iterator[tuple[Barrier, int, int]]:
    line = 1
    for i, token in enumerate(tokens):
        directive = (
            re.match(r'\s*#\s*line\s+(\d+)(?:\s+"([^"]*)")?', token.text) if token.kind == "directive" else None
        )
        if directive:
            line, file = int(directive.group(1)) - 1, directive.group(2) or file
        if token.text in BARRIERS and token.kind == "word":
            end = closing(tokens, neighbour(tokens, i)) + 1
            yield Barrier(file, line, text_of(tokens[i:end])), i, end
        line += token.text.count("\n")


@dataclass(slots=True)
class Mutant:
    """Makes kernels without one barrier."""

    bench: Bench
    barrier: Barrier
    removed: bool = field(default=False, init=False)

    def metal_kernel(self, *, source: str, header: str = "", **arguments: Any) -> MetalKernel:
        mutated = [without(text, self.barrier) for text in (source, header)]
        self.removed |= mutated != [source, header]
        return self.bench.metal_kernel(source=mutated[0], header=mutated[1], **arguments)


def survivors(bench: Bench, found: Iterable[Barrier], run: CaseRunner) -> Iterator[tuple[Barrier, str]]:
    """The barriers whose removal `run` did not notice, each with the reason."""
    for barrier in found:
        mutant = Mutant(bench, barrier)
        try:
            run(mutant.metal_kernel, barrier.file)
        except Exception as failure:
            if not mutant.removed:
                yield barrier, f"the cases fail without its removal: {failure}"
            continue
        yield barrier, "no check fails" if mutant.removed else "the cases do not use it"


def kernel_barriers(folder: Path = KERNELS) -> list[Barrier]:
    """All barriers of the kernels in a folder."""
    return [barrier for path in sorted(folder.glob("*.metal")) for barrier in barriers(path.read_text(), path.name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", help="module:function that runs the checks")
    module, _, function = parser.parse_args().cases.partition(":")
    run: CaseRunner = getattr(importlib.import_module(module), function or "run")
    bench = Bench()
    found = kernel_barriers()
    missed = dict(survivors(bench, found, run))
    for barrier in found:
        print(f"{'MISSED ' + missed[barrier] if barrier in missed else 'noticed'}  {barrier}", flush=True)
    print(f"{len(found) - len(missed)} of {len(found)} removals noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
