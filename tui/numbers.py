"""Figures as short text of predictable width."""

from __future__ import annotations

UNKNOWN = "—"


def count(value: int | None) -> str:
    """1236 -> "1 236"."""
    return UNKNOWN if value is None else f"{value:,}".replace(",", " ")


def short(value: int | float | None) -> str:
    """At most five cells: 999, 1.2k, 32k, 1.2M. 1k is 1,024 only for exact powers of two (contexts)."""
    if value is None:
        return UNKNOWN
    if value < 1000:
        return f"{value:.0f}"
    if value >= 1024 and value % 1024 == 0 and value < 1024 * 1024:
        return f"{int(value) // 1024}k"
    for unit, size in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        scaled = value / size
        if scaled < 9.95:
            return f"{scaled:.1f}{unit}"
        if scaled < 999.5:
            return f"{scaled:.0f}{unit}"
    return f"{value / 1e12:.1f}T"


def rate(value: float | None) -> str:
    """Tokens per second: one decimal below 100."""
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if value < 99.95 else count(round(value))


def seconds(value: float | None) -> str:
    """0.31 -> "310 ms", 4.2 -> "4.2 s", 125 -> "2m05s"."""
    if value is None:
        return UNKNOWN
    if value < 0.0995:
        text = f"{value * 1000:.1f}" if 0 < value < 0.00995 else f"{value * 1000:.0f}"
        return f"{text} ms"
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 99.95:
        return f"{value:.1f} s"
    if value < 3600:
        return f"{int(value) // 60}m{int(value) % 60:02d}s"
    return f"{int(value) // 3600}h{int(value) % 3600 // 60:02d}m"


def milliseconds(value: float | None) -> str:
    """A bare number of milliseconds, for columns whose head names the unit."""
    return UNKNOWN if value is None else count(round(value * 1000))


def size(value: int | float | None) -> str:
    """Bytes in powers of ten: 2.3 GB."""
    if value is None:
        return UNKNOWN
    if value < 1000:
        return f"{value:.0f} B"
    for unit, scale in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if value / scale < 999.5:
            scaled = value / scale
            return f"{scaled:.1f} {unit}" if scaled < 9.95 else f"{scaled:.0f} {unit}"
    return f"{value / 1e12:.1f} TB"


def percent(part: float, whole: float) -> str:
    """Rounded, but 0 % only for none and 100 % only for all."""
    if whole <= 0:
        return "0 %"
    share = part / whole * 100
    if 0 < share < 1:
        return "<1 %"
    if 99 < share < 100:
        return "99 %"
    return f"{share:.0f} %"
