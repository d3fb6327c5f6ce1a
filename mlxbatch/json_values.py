"""Which JSON values a message to the engine process can hold."""

from __future__ import annotations

from mlxbatch.request import LARGEST_INTEGER, LEAST_INTEGER

DEEPEST = 200  # levels of lists and objects


def problem_for_the_engine(value: object) -> str | None:
    """Why no message to the engine process can hold a JSON value, if none can."""
    level = [value]
    for _ in range(DEEPEST):
        if not level:
            return None
        if any(isinstance(v, int) and not LEAST_INTEGER <= v <= LARGEST_INTEGER for v in level):
            return "has a number of more than 64 bits"
        inner = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list)))
        level = [v for values in inner for v in values]
    return f"is nested more than {DEEPEST} deep"
