"""Which attention serves: the Metal kernels where they have been compared with the reference, else the reference.

A variant (operation, dtype, head counts and dims, ...) is compiled and compared the first time a layer asks for
it, on small random memory. The warm-up step with which an engine loads a model asks for all of them, so no request
waits for a compiler.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import mlx.core as mx

from mlxbatch.config import AttentionChoice
from mlxbatch.errors import UsageError
from mlxbatch.execution.attention.layout import (
    AttentionSpec,
    ChunkLayout,
    DecodeLayout,
    LayerKV,
    PagedAttention,
)
from mlxbatch.execution.attention.metal import MetalAttention
from mlxbatch.execution.attention.metal_check import TOLERANCE, Variant, check_variant
from mlxbatch.execution.attention.metal_latent import LATENT_DIM, ROPE_DIM
from mlxbatch.execution.attention.metal_timing import kernels_are_faster
from mlxbatch.execution.attention.metal_work import CHUNK_TOKENS
from mlxbatch.execution.attention.reference import ReferenceAttention

logger = logging.getLogger(__name__)


def choose_attention(choice: AttentionChoice = "auto", *, measured: bool = True) -> PagedAttention:
    """`auto` takes the Metal kernels where there is a GPU that runs them. Raises UsageError for `metal` where
    there is none. Kernels that differ from the reference are named in a warning and replaced by it; with `auto`
    so are, silently, kernels that measure slower than it, unless `measured` is False: a measurement may come out
    otherwise the next time, and with it the rounding."""
    has_gpu = mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
    if choice == "metal" and not has_gpu:
        raise UsageError(
            "--attention metal needs an Apple GPU that MLX can use, and this process has none; "
            "--attention reference runs anywhere, --attention auto picks what the machine has"
        )
    if choice == "reference" or not has_gpu:
        return ReferenceAttention()
    return CheckedAttention(
        MetalAttention(flops_per_second=dispatch_flops()),
        ReferenceAttention(),
        prefer=kernels_are_faster if choice == "auto" and measured else None,
    )


def dispatch_flops() -> float:
    """FLOP/s that a prefill dispatch can be counted on to reach: a quarter of the chip's peak."""
    from mlxbatch.capacity.chips import detect_chip

    chip = detect_chip()
    return chip.flops / 4 if chip is not None else 1e12


def what_kernels_lack(variant: Variant) -> str | None:
    """Why there is no kernel for a variant; None if there is one."""
    if variant.is_latent:
        if (variant.key_dim, variant.value_dim) != (LATENT_DIM, ROPE_DIM):
            return f"latent attention is {LATENT_DIM} + {ROPE_DIM} channels wide"
        if variant.spec.softcap:
            return "latent attention has no soft-cap"
    sizes = (variant.block_size, variant.tail_len, variant.key_dim, variant.value_dim)
    return "sizes must be multiples of 8" if any(size % 8 for size in sizes) else None


class CheckedAttention:
    """`PagedAttention` that sends each variant to `kernels` if they agree with `reference` on it.

    `report` gets one line for each variant that does not. `prefer`, asked once about a variant that agrees, says
    whether the kernels are worth it.
    """

    def __init__(
        self,
        kernels: PagedAttention,
        reference: PagedAttention,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        report: Callable[[str], None] | None = None,
        prefer: Callable[[Variant, PagedAttention, PagedAttention], bool] | None = None,
    ) -> None:
        self._kernels = kernels
        self._reference = reference
        self._chunk_tokens = chunk_tokens
        self._report = report or logger.warning
        self._prefer = prefer
        self._serving: dict[Variant, PagedAttention] = {}

    @property
    def replaced(self) -> tuple[str, ...]:
        """Names of the variants that the reference serves."""
        return tuple(v.name for v, serving in self._serving.items() if serving is self._reference)

    def _pick(self, variant: Variant) -> PagedAttention:
        serving = self._serving.get(variant)
        if serving is None:
            serving = self._serving[variant] = self._checked(variant)
            # What the check took is not what a step takes: whoever measures a step's peak must not see it.
            mx.clear_cache()
            mx.reset_peak_memory()
        return serving

    def _checked(self, variant: Variant) -> PagedAttention:
        missing = what_kernels_lack(variant)
        if missing is not None:
            self._report(f"no Metal kernel for {variant.name}: {missing}; the reference serves")
            return self._reference
        started = time.perf_counter()
        try:
            error = check_variant(variant, self._kernels, self._reference, self._chunk_tokens)
        except (RuntimeError, ValueError) as problem:  # what MLX raises when Metal refuses a kernel
            first_line = str(problem).strip().partition("\n")[0]
            self._report(
                f"the Metal kernel for {variant.name} does not run ({first_line}); the reference serves"
            )
            return self._reference
        limit = TOLERANCE[variant.dtype]
        if not error <= limit:
            self._report(
                f"the Metal kernel for {variant.name} is off by {error:.1e} (limit {limit:.0e}); "
                "the reference serves. Please report this with the output of `mlxbatch doctor --kernels --json`"
            )
            return self._reference
        if self._prefer is not None and not self._prefer(variant, self._kernels, self._reference):
            logger.info("%s: plain MLX operations are faster here and serve it", variant.name)
            return self._reference
        logger.info("%s: off by %.1e, %.2f s", variant.name, error, time.perf_counter() - started)
        return self._kernels

    def decode(
        self,
        q: mx.array,
        kv: LayerKV,
        layout: DecodeLayout,
        spec: AttentionSpec,
        sinks: mx.array | None = None,
    ) -> mx.array:
        variant = _variant("decode", q, kv, spec, q.shape[2], sinks is not None)
        return self._pick(variant).decode(q, kv, layout, spec, sinks)

    def prefill(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        kv: LayerKV,
        layout: ChunkLayout,
        spec: AttentionSpec,
        sinks: mx.array | None = None,
    ) -> mx.array:
        variant = _variant("prefill", q, kv, spec, 1, sinks is not None)
        return self._pick(variant).prefill(q, k, v, kv, layout, spec, sinks)

    def decode_latent(
        self,
        q_latent: mx.array,
        q_rope: mx.array,
        kv: LayerKV,
        layout: DecodeLayout,
        spec: AttentionSpec,
    ) -> mx.array:
        variant = _variant("decode_latent", q_latent, kv, spec, q_latent.shape[2], False)
        return self._pick(variant).decode_latent(q_latent, q_rope, kv, layout, spec)

    def prefill_latent(
        self,
        q_latent: mx.array,
        q_rope: mx.array,
        latent: mx.array,
        rope: mx.array,
        kv: LayerKV,
        layout: ChunkLayout,
        spec: AttentionSpec,
    ) -> mx.array:
        variant = _variant("prefill_latent", q_latent, kv, spec, 1, False)
        return self._pick(variant).prefill_latent(q_latent, q_rope, latent, rope, kv, layout, spec)


def _variant(
    operation: str, q: mx.array, kv: LayerKV, spec: AttentionSpec, q_len: int, has_sinks: bool
) -> Variant:
    return Variant(
        operation=operation,
        dtype=kv.tail_k.dtype,
        query_heads=q.shape[1],
        kv_heads=kv.tail_k.shape[1],
        key_dim=kv.tail_k.shape[3],
        value_dim=kv.tail_v.shape[3],
        block_size=kv.block_size,
        tail_len=kv.tail_len,
        q_len=q_len,
        spec=spec,
        has_sinks=has_sinks,
    )
