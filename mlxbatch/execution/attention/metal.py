"""Paged attention by our Metal kernels."""

from __future__ import annotations

import mlx.core as mx

from mlxbatch.execution.attention.layout import AttentionSpec, ChunkLayout, DecodeLayout, LayerKV
from mlxbatch.execution.attention.metal_decode import DecodeKernels
from mlxbatch.execution.attention.metal_latent import LatentKernels
from mlxbatch.execution.attention.metal_prefill import PrefillKernel
from mlxbatch.execution.attention.metal_source import KernelFactory, mlx_kernel_factory
from mlxbatch.execution.attention.metal_work import CHUNK_TOKENS, Constants

FUSED_HEAD_DIMS = (64, 80, 128)  # of MLX's own fused prefill attention


class MetalAttention:
    """`PagedAttention` on a GPU. Block sizes and tail lengths are multiples of 8, head dims too.

    A fresh prompt (no context before the chunk) goes to MLX's fused attention where that is fused, unless
    `own_prefill`. `kernel_factory` stands for `mx.fast.metal_kernel`.
    """

    def __init__(
        self,
        kernel_factory: KernelFactory | None = None,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        flops_per_second: float = 1e12,
        own_prefill: bool = False,
    ) -> None:
        factory = kernel_factory or mlx_kernel_factory()
        constants = Constants()
        self._decode = DecodeKernels(factory, constants, chunk_tokens)
        self._prefill = PrefillKernel(factory, constants, flops_per_second)
        self._latent = LatentKernels(factory, constants, chunk_tokens, flops_per_second)
        self._own_prefill = own_prefill

    def decode(
        self,
        q: mx.array,
        kv: LayerKV,
        layout: DecodeLayout,
        spec: AttentionSpec,
        sinks: mx.array | None = None,
    ) -> mx.array:
        return self._decode(q, kv, layout, spec, sinks)

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
        if not self._own_prefill and self._suits_mlx(q, v, layout, spec):
            return mx.fast.scaled_dot_product_attention(
                q, k, v, scale=spec.scale, mask="causal", sinks=sinks
            )
        return self._prefill(q, k, v, kv, layout, spec, sinks)

    def decode_latent(
        self,
        q_latent: mx.array,
        q_rope: mx.array,
        kv: LayerKV,
        layout: DecodeLayout,
        spec: AttentionSpec,
    ) -> mx.array:
        return self._latent.decode(q_latent, q_rope, kv, layout, spec)

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
        return self._latent.prefill(q_latent, q_rope, latent, rope, kv, layout, spec)

    @staticmethod
    def _suits_mlx(q: mx.array, v: mx.array, layout: ChunkLayout, spec: AttentionSpec) -> bool:
        window_hides = spec.window is not None and spec.window < layout.num_tokens
        fused = q.shape[-1] == v.shape[-1] and q.shape[-1] in FUSED_HEAD_DIMS
        return layout.start == 0 and fused and not spec.softcap and not window_hides
