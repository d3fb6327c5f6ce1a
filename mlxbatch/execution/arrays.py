"""Indexed writes on MLX arrays as functions of values."""

from __future__ import annotations

import copy

import mlx.core as mx


def with_rows(array: mx.array, index: mx.array | tuple[mx.array, ...], rows: mx.array) -> mx.array:
    """`array` with `rows` at `index` of its first axis, or at indices of its first axes. Takes over the buffer if
    nothing else holds it."""
    out = copy.copy(array)  # a second name of the value: an indexed write changes one name only
    out[index] = rows
    return out
