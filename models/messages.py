"""How lists of names go into error messages."""

from __future__ import annotations

from collections.abc import Iterable


def shortened(names: Iterable[str], limit: int = 20) -> str:
    """The first names in order, and how many more there are."""
    listed = sorted(names)
    more = len(listed) - limit
    return ", ".join(listed[:limit]) + (f" and {more} more" if more > 0 else "")
