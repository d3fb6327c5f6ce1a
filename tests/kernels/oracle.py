"""Attention in float64 NumPy, written from the definition, for one sequence at a time."""

from __future__ import annotations

import numpy as np

TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5}


def attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    positions: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """queries [Hq, q, D] at `positions` [q]; keys [Hk, n, D], values [Hk, n, Dv] of positions 0..n-1. A query at
    p sees positions (p - window, p]. Returns [Hq, q, Dv]."""
    heads, count, _ = queries.shape
    group = heads // keys.shape[0]
    out = np.zeros((heads, count, values.shape[2]))
    for head in range(heads):
        for i, position in enumerate(positions):
            if position < 0:  # a padding row: sees nothing, gives zeros
                continue
            first = max(0, position - window + 1) if window else 0
            k = keys[head // group, first : position + 1]
            v = values[head // group, first : position + 1]
            score = k @ queries[head, i] * scale
            if softcap:
                score = np.tanh(score / softcap) * softcap
            top = score.max() if sinks is None else max(score.max(), sinks[head])
            weight = np.exp(score - top)
            total = weight.sum() + (0.0 if sinks is None else np.exp(sinks[head] - top))
            out[head, i] = weight @ v / total
    return out


def deviation(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest error, relative for values above 1; inf for NaN."""
    error = np.abs(got - expected) / np.maximum(1.0, np.abs(expected))
    return float(np.nan_to_num(error, nan=np.inf).max())
