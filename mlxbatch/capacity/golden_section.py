"""One-dimensional minimisation."""

from __future__ import annotations

import math
from collections.abc import Callable


def minimum(f: Callable[[float], float], low: float, high: float, *, steps: int = 40) -> float:
    """Where a function with one valley is least, by golden-section search."""
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    fa, fb = f(a), f(b)
    for _ in range(steps):
        if fa < fb:
            high, b, fb = b, a, fa
            a = high - ratio * (high - low)
            fa = f(a)
        else:
            low, a, fa = a, b, fb
            b = low + ratio * (high - low)
            fb = f(b)
    return (low + high) / 2.0
