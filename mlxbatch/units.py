"""Sizes and durations as people write them. GB is 10^9 bytes and GiB 2^30 everywhere in mlxbatch."""

from __future__ import annotations

import re

from mlxbatch.errors import UsageError

BYTES_PER_UNIT = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
SECONDS_PER_UNIT = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

_QUANTITY = re.compile(r"\s*(\d+(?:[_ ]\d{3})*(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Bytes in "4GB", "1.5 GiB", "800 MB" or a plain number. Units are read in any case.

    A fraction of a byte is dropped. Raises UsageError for anything else, negative sizes included.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise UsageError(f"a size cannot be negative: {text}")
        return text
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    factor = BYTES_PER_UNIT.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise UsageError(f"cannot read {text!r} as a size; write 4GB (10^9 bytes each) or 4GiB (2^30 bytes)")
    whole, _, fraction = re.sub("[_ ]", "", match[1]).partition(".")
    # Integer arithmetic: a float would round sizes above 2^53 and turn 1.1GB into 1100000000.0000002.
    return (int(whole or "0") * 10 ** len(fraction) + int(fraction or "0")) * factor // 10 ** len(fraction)


def format_bytes(count: int | float, *, binary: bool = False) -> str:
    """A size for people, with three significant digits: "8.59 GB", or "8.00 GiB" with `binary`."""
    step = 1024 if binary else 1000
    units = ("B", "KiB", "MiB", "GiB", "TiB") if binary else ("B", "KB", "MB", "GB", "TB")
    value = float(count)
    index = 0
    while index < len(units) - 1 and abs(_rounded(value)) >= step:
        value /= step
        index += 1
    return f"{value:.0f} {units[index]}" if index == 0 else f"{_three_digits(value)} {units[index]}"


def parse_seconds(text: str | int | float) -> float:
    """Seconds in "50ms", "1.5s", "30min", "2h" or a plain number. Raises UsageError for anything else."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if not 0 <= text < float("inf"):
            raise UsageError(f"a duration cannot be negative or without end: {text}")
        return float(text)
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    factor = SECONDS_PER_UNIT.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"cannot read {text!r} as a duration; write it like 50ms, 2s, 30min or 1h")
    return float(re.sub("[_ ]", "", match[1])) * factor


def format_seconds(seconds: float) -> str:
    """A duration for people: "420 us", "54.3 ms", "1.42 s", "3 min 05 s", "2 h 07 min"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if _rounded(seconds * 1e3) < 1000:
        return f"{_three_digits(seconds * 1e3)} ms"
    if _rounded(seconds) < 60:
        return f"{_three_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def _rounded(value: float) -> float:
    """`value` at three significant digits, so that 999.7 MB becomes 1.00 GB and not 1000 MB."""
    return float(f"{value:.3g}")


def _three_digits(value: float) -> str:
    magnitude = abs(_rounded(value))
    return f"{value:.0f}" if magnitude >= 100 else f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"
