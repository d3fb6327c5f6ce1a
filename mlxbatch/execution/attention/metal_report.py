"""The table of `mlxbatch doctor --kernels`: every kind of variant, compared with plain MLX and, on a GPU, timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import mlx.core as mx

from mlxbatch.execution.attention.layout import AttentionSpec, PagedAttention
from mlxbatch.execution.attention.metal_check import TOLERANCE, Variant, check_variant
from mlxbatch.execution.attention.metal_timing import time_variant
from mlxbatch.execution.attention.metal_work import CHUNK_TOKENS

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
LATENT_DIMS = (512, 64)


@dataclass(frozen=True, slots=True)
class KernelRow:
    """`problem` says why the kernels do not serve this variant; None if they do. Seconds are of one call, with
    8 rows of 2,048 positions for decode and 256 tokens behind 1,024 for prefill; None where not timed.
    `least_bytes` are the K and V that a call has to read. `plain_seconds` is the reference's: a gather and
    MLX's own operations."""

    variant: str
    deviation: float | None
    tolerance: float
    problem: str | None
    seconds: float | None = None
    least_bytes: int | None = None
    plain_seconds: float | None = None

    @property
    def bytes_per_second(self) -> float | None:
        return self.least_bytes / self.seconds if self.least_bytes and self.seconds else None

    @property
    def speedup(self) -> float | None:
        return self.plain_seconds / self.seconds if self.plain_seconds and self.seconds else None


def standard_variants() -> list[Variant]:
    """Each head dim in each dtype, and one variant for each feature beside them."""
    spec = AttentionSpec(scale=0.1)

    def variant(
        operation: str = "decode",
        dtype: mx.Dtype = mx.float16,
        dims: tuple[int, int] = (128, 128),
        heads: tuple[int, int] = (8, 2),
        block_size: int = 16,
        q_len: int = 1,
        spec: AttentionSpec = spec,
        has_sinks: bool = False,
        bits: int = 0,
    ) -> Variant:
        return Variant(
            operation, dtype, *heads, *dims, block_size, max(32, 2 * block_size), q_len, spec, has_sinks, bits
        )

    variants = []
    for operation in ("decode", "prefill"):
        for dtype, dim in product((mx.float16, mx.bfloat16), HEAD_DIMS):
            variants.append(variant(operation, dtype, (dim, dim)))
        variants.append(variant(operation, mx.float32))
        variants.append(variant(operation, dims=(192, 128)))
        for block_size in (8, 32):
            variants.append(variant(operation, block_size=block_size))
        for heads in ((2, 2), (32, 2)):
            variants.append(variant(operation, heads=heads))
        variants.append(variant(operation, spec=AttentionSpec(0.1, window=64)))
        variants.append(variant(operation, spec=AttentionSpec(0.1, softcap=30.0)))
        variants.append(variant(operation, dims=(64, 64), has_sinks=True))
        for bits in (8, 4):
            variants.append(variant(operation, bits=bits))
    variants += [variant(q_len=q_len) for q_len in (2, 8)]
    for operation, dtype in product(("decode_latent", "prefill_latent"), (mx.float16, mx.bfloat16)):
        variants.append(variant(operation, dtype, LATENT_DIMS, heads=(16, 1)))
    return variants


def report_kernels(
    kernels: PagedAttention,
    reference: PagedAttention,
    *,
    timed: bool,
    variants: Sequence[Variant] | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Iterator[KernelRow]:
    for variant in standard_variants() if variants is None else variants:
        tolerance = TOLERANCE[variant.dtype]
        try:
            error = check_variant(variant, kernels, reference, chunk_tokens)
        except (RuntimeError, ValueError) as problem:  # what MLX raises when Metal refuses a kernel
            yield KernelRow(variant.name, None, tolerance, str(problem).strip().partition("\n")[0])
            continue
        if not error <= tolerance:
            yield KernelRow(variant.name, error, tolerance, "differs from the reference")
            continue
        if not timed:
            yield KernelRow(variant.name, error, tolerance, None)
            continue
        timing = time_variant(variant, kernels)
        plain = None if variant.bits else time_variant(variant, reference).seconds
        yield KernelRow(variant.name, error, tolerance, None, timing.seconds, timing.kv_bytes, plain)
