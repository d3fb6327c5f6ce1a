"""Sampling noise as a function of (seed, position) alone: the same request draws the same tokens whatever
runs beside it, before and after a preemption, and in another batch."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def sampling_keys(seeds: np.ndarray, positions: np.ndarray) -> mx.array:
    """One threefry key for each row: uint32 [n, 2] from uint64 seeds and positions.

    Two rounds of SplitMix64 (Steele, Lea, Flood 2014), so that neighbouring seeds and positions give
    unrelated keys.
    """
    with np.errstate(over="ignore"):
        mixed = _splitmix(_splitmix(seeds.astype(np.uint64)) + positions.astype(np.uint64))
    return mx.array(np.stack([mixed >> np.uint64(32), mixed & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32))


def gumbel(keys: mx.array, width: int) -> mx.array:
    """Standard Gumbel noise float32 [n, width]; row i depends on keys[i] only. The argmax of logits plus this
    is a sample of their softmax."""
    return mx.vmap(lambda key: mx.random.gumbel((width,), key=key))(keys)


def _splitmix(value: np.ndarray) -> np.ndarray:
    value = value + _GAMMA
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))
