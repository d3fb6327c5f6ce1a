"""Addresses in a compiled kernel to lines of the Metal source, through the DWARF that clang leaves in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from elftools.dwarf.ranges import BaseAddressEntry
from elftools.elf.elffile import ELFFile

from .compile import SHIM, TRAMPOLINE


@dataclass(frozen=True, slots=True)
class Location:
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def own_file(file: str) -> bool:
    """True for the bench's and MLX's library code, whose frames are left out."""
    return (
        f"{SHIM.parent.name}/{SHIM.name}/" in file  # clang makes paths relative to where it runs
        or file.endswith(("generated_vectors.h", TRAMPOLINE, "(signature)"))
        or "/mlx/backend/" in file
    )


class Symbols:
    """Reads the library's debug information once."""

    def __init__(self, library: Path):
        dwarf = ELFFile(BytesIO(library.read_bytes())).get_dwarf_info()
        self._ranges: Any = dwarf.range_lists()
        self._units = []
        for unit in dwarf.iter_CUs():
            program = dwarf.line_program_for_CU(unit)
            if program is None:
                continue
            files = program.header.file_entry
            base = 1 if program.header.version < 5 else 0
            names = {i + base: entry.name.decode() for i, entry in enumerate(files)}
            directories = [d.decode() for d in program.header.include_directory]
            for i, entry in enumerate(files):
                if entry.dir_index and program.header.version < 5:
                    names[i + base] = f"{directories[entry.dir_index - 1]}/{entry.name.decode()}"
            rows = sorted(
                (e.state.address, names.get(e.state.file, "?"), e.state.line)
                for e in program.get_entries()
                if e.state is not None and not e.state.end_sequence
            )
            self._units.append((unit.get_top_DIE(), names, rows))

    def locations(self, address: int) -> list[Location]:
        """The lines that lead to `address` (a return address), innermost first: itself, and where it was inlined."""
        address -= 1
        for top, names, rows in self._units:
            path = self._path(top, address)
            if not path:
                continue
            row = rows[bisect_right(rows, (address, chr(0x10FFFF), 0)) - 1]
            found = [Location(row[1], row[2])]
            for die in reversed(path):
                if die.tag == "DW_TAG_inlined_subroutine":
                    file = names.get(die.attributes["DW_AT_call_file"].value, "?")
                    found.append(Location(file, die.attributes["DW_AT_call_line"].value))
            return [place for place in found if place.line and not own_file(place.file)]
        return []

    def _path(self, die: Any, address: int) -> list[Any]:
        """The function and the inlined functions inside it that contain the address, outermost first."""
        for child in die.iter_children():
            if child.tag == "DW_TAG_lexical_block" or any(lo <= address < hi for lo, hi in self._spans(child)):
                inner = self._path(child, address)
                if child.tag != "DW_TAG_lexical_block":
                    return [child, *inner]
                if inner:
                    return inner
        return []

    def _spans(self, die: Any) -> Iterator[tuple[int, int]]:
        low = die.attributes.get("DW_AT_low_pc")
        high = die.attributes.get("DW_AT_high_pc")
        if low is not None and high is not None:
            yield low.value, high.value + (low.value if high.form != "DW_FORM_addr" else 0)
        elif "DW_AT_ranges" in die.attributes:
            base_die = die.cu.get_top_DIE().attributes.get("DW_AT_low_pc")
            base = base_die.value if base_die is not None else 0
            for entry in self._ranges.get_range_list_at_offset(die.attributes["DW_AT_ranges"].value):
                if isinstance(entry, BaseAddressEntry):
                    base = entry.base_address
                else:
                    yield base + entry.begin_offset, base + entry.end_offset
