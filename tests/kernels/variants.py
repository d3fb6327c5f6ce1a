"""Which combinations of variants the kernel tests run: pairwise covering sets, extremes, random ones."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scene import Case

DTYPES = ("float16", "bfloat16", "float32")
HEAD_DIMS = (
    (64, 64),
    (80, 80),
    (96, 96),
    (112, 112),
    (128, 128),
    (192, 192),
    (256, 256),
    (192, 128),
    (64, 128),
)
BLOCK_SIZES = (8, 16, 32)
BITS = (0, 8, 4)
GROUPS = tuple(range(1, 17))
QUERY_LENGTHS = tuple(range(1, 9))
WINDOWS = (None, 24, 100)
SOFTCAPS = (None, 12.0)
CHUNK_TOKENS = (32, 80, 256)

DECODE_FACTORS: dict[str, Sequence[Any]] = {
    "dtype": DTYPES,
    "dims": HEAD_DIMS,
    "block_size": BLOCK_SIZES,
    "bits": BITS,
    "group": GROUPS,
    "q_len": QUERY_LENGTHS,
    "window": WINDOWS,
    "softcap": SOFTCAPS,
    "sinks": (False, True),
    "chunk_tokens": CHUNK_TOKENS,
}
PREFILL_FACTORS: dict[str, Sequence[Any]] = {
    "dtype": DTYPES,
    "dims": HEAD_DIMS,
    "block_size": BLOCK_SIZES,
    "bits": BITS,
    "group": (1, 2, 3, 5, 8, 16),
    "window": WINDOWS,
    "softcap": SOFTCAPS,
    "sinks": (False, True),
}


@dataclass(frozen=True)
class Variant:
    """A case and how it is called. `seed` also picks the lengths."""

    case: Case
    q_len: int
    chunk_tokens: int
    seed: int

    @property
    def name(self) -> str:
        c = self.case
        extras = [f"w{c.window}" if c.window else "", "cap" if c.softcap else "", "sinks" if c.sinks else ""]
        parts = [
            c.dtype,
            f"{c.key_dim}-{c.value_dim}",
            f"b{c.block_size}",
            f"kv{c.bits or 'dense'}",
            f"g{c.group}",
        ]
        return " ".join([*parts, f"q{self.q_len}", f"c{self.chunk_tokens}", *filter(None, extras)])


def make_variant(choice: Mapping[str, Any], seed: int) -> Variant:
    key_dim, value_dim = choice["dims"]
    case = Case(
        dtype=choice["dtype"],
        key_dim=key_dim,
        value_dim=value_dim,
        kv_heads=1 + seed % 2 if choice["group"] * choice.get("q_len", 1) <= 16 else 1,
        group=choice["group"],
        block_size=choice["block_size"],
        bits=choice["bits"],
        window=choice["window"],
        softcap=choice["softcap"],
        sinks=choice["sinks"],
    )
    return Variant(case, choice.get("q_len", 1), choice.get("chunk_tokens", 256), seed)


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Choices such that every two levels of every two factors occur together (greedy, 40 candidates a step)."""
    random = np.random.default_rng(seed)
    names = list(factors)
    missing = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]
    }
    chosen = []
    while missing:
        (a, x), (b, y) = min(missing, key=repr)
        best: tuple[int, dict[str, Any]] = (0, {})
        for _ in range(40):
            choice = {name: levels[random.integers(len(levels))] for name, levels in factors.items()}
            choice.update({a: x, b: y})
            covered = sum(pair in missing for pair in _pairs(choice))
            if covered > best[0]:
                best = (covered, choice)
        chosen.append(best[1])
        missing.difference_update(_pairs(best[1]))
    return chosen


def _pairs(choice: Mapping[str, Any]) -> list[tuple[tuple[str, Any], tuple[str, Any]]]:
    return list(itertools.combinations(choice.items(), 2))


def extremes(factors: Mapping[str, Sequence[Any]], plain: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`plain` with one factor at a time at its first and at its last level."""
    return [{**plain, name: level} for name, levels in factors.items() for level in (levels[0], levels[-1])]


PLAIN_DECODE = {
    "dtype": "float16",
    "dims": (128, 128),
    "block_size": 16,
    "bits": 0,
    "group": 4,
    "q_len": 1,
    "window": None,
    "softcap": None,
    "sinks": False,
    "chunk_tokens": 80,
}
PLAIN_PREFILL = {name: PLAIN_DECODE[name] for name in PREFILL_FACTORS}


def decode_variants() -> list[Variant]:
    choices = pairwise(DECODE_FACTORS) + extremes(DECODE_FACTORS, PLAIN_DECODE)
    return [make_variant(choice, seed) for seed, choice in enumerate(choices)]


def prefill_variants() -> list[Variant]:
    choices = pairwise(PREFILL_FACTORS) + extremes(PREFILL_FACTORS, PLAIN_PREFILL)
    return [make_variant(choice, seed) for seed, choice in enumerate(choices)]


def random_variant(seed: int) -> Variant:
    random = np.random.default_rng(seed)
    return make_variant(
        {n: levels[random.integers(len(levels))] for n, levels in DECODE_FACTORS.items()}, seed
    )


def decode_lengths(variant: Variant) -> list[int]:
    """Ragged rows: a short one, one at a boundary of blocks or chunks, any other where queries are few."""
    random = np.random.default_rng(variant.seed)
    boundary = int(random.choice([variant.case.block_size, variant.chunk_tokens]))
    times = int(random.integers(1, 1 + max(1, 100 // boundary)))
    lengths = [variant.q_len + int(random.integers(0, 3)), boundary * times, int(random.integers(1, 120))]
    if variant.case.group * variant.q_len > 32:
        lengths.pop()
    return [max(n, variant.q_len) for n in lengths]
