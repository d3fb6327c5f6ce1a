"""Writes models/SUPPORT.md: every model file of the installed mlx-lm, how mlxbatch runs it, and how exactly.

python tests/parity/support_table.py            compare the table with what is installed
python tests/parity/support_table.py --write    measure every family again, a few minutes on two cores
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from mlxbatch.execution.backend import prepare_backend  # noqa: E402

prepare_backend()

from families import BLOCK_SIZE, TOLERANCE, WITHOUT_CACHE, check_family  # noqa: E402
from metal_only import STAND_INS  # noqa: E402
from mlx_lm_families import family_names  # noqa: E402

from mlxbatch.errors import ModelError  # noqa: E402
from mlxbatch.models.adapters import adapter_names  # noqa: E402

TABLE = Path(__file__).parents[2] / "mlxbatch" / "models" / "SUPPORT.md"
REFUSED = "refused"
EXPLANATION = f"""\
- **packed**: all tokens of a step, prefill chunks and decode rows alike, in one forward pass.
- **segmented**: models with recurrent layers. Decode rows in one pass, each prefill chunk in its own; the state is
  kept by sequence, and prefix caching is off.
- **adapter**: a small change of how the family's layers call attention, in `adapters/`.
- **refused**: for the reason given, before any weights are read.

The figure is the largest difference of any logit from mlx-lm's own forward pass of each sequence alone, over the
largest logit: a tiny random model in float32 on the CPU, three sequences, prefill chunks and decode rows mixed,
shuffled blocks of {BLOCK_SIZE} tokens. Up to {TOLERANCE:.0e} passes; the same run with positions off by one, or with
blocks exchanged between sequences, must be off by ten times that. It says nothing of a family's tokenizer or
templates, nor of Metal, whose kernels are checked when a model loads.

Written by `python tests/parity/support_table.py --write`; a test compares it with the mlx-lm that is installed."""


@dataclass(frozen=True)
class Row:
    """`mode` is packed, segmented or refused; `detail` the tiny model's layers, or the reason."""

    name: str
    mode: str
    detail: str
    error: str = ""

    @property
    def line(self) -> str:
        mode = f"{self.mode}, adapter" if self.name in adapter_names() and self.mode != REFUSED else self.mode
        return f"| {self.name} | {mode} | {self.error} | {self.detail} |"


def measured(name: str) -> Row:
    """Raises AssertionError when a family that runs does not give mlx-lm's logits."""
    try:
        parity = check_family(name)
    except ModelError as error:
        return Row(name, REFUSED, str(error).partition(": ")[2])
    if not parity.holds:
        raise AssertionError(f"{name}: {parity}")
    return Row(name, parity.mode, described(name, parity.kinds), f"{max(parity.error, parity.sampled):.0e}")


def described(name: str, kinds: tuple[str, ...]) -> str:
    notes = [", ".join(kinds)]
    if name in WITHOUT_CACHE:
        notes.append(f"against mlx-lm without a cache: {WITHOUT_CACHE[name]}")
    if name in STAND_INS:
        notes.append("with stand-ins for its own Metal kernels, which run on a Mac only")
    return "; ".join(notes)


def read_table() -> dict[str, Row]:
    rows = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"\| (\S+) \| (\w+)(?:, adapter)? \| (\S*) \| (.*) \|", line):
            name, mode, error, detail = match.groups()
            rows[name] = Row(name, mode, detail, error)
    return rows


def rendered(rows: list[Row]) -> str:
    running = [row for row in rows if row.mode != REFUSED]
    counts = {mode: sum(row.mode == mode for row in rows) for mode in ("packed", "segmented", REFUSED)}
    title = (
        f"mlx-lm {version('mlx-lm')} has {len(rows)} model files. mlxbatch runs {len(running)} of them with the same "
        f"logits, {counts['packed']} packed and {counts['segmented']} segmented, and refuses {counts[REFUSED]}."
    )
    header = "| model file | mode | largest difference | layers of the tiny model, or reason |\n" + "| --- " * 4 + "|"
    table = "\n".join([header, *(row.line for row in rows)])
    return "\n\n".join(["# Model families", title, EXPLANATION, table]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="measure every family and write the table")
    if not parser.parse_args().write:
        missing = set(family_names()) ^ set(read_table())
        print("\n".join(sorted(missing)) or "the table names what is installed")
        return bool(missing)
    rows = []
    for name in family_names():
        rows.append(measured(name))
        print(rows[-1].line, flush=True)
    TABLE.write_text(rendered(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
