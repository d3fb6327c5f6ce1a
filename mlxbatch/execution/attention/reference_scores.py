"""From scores to weights: soft cap, mask, softmax, sinks; for decode rows and chunks alike."""

from __future__ import annotations

import mlx.core as mx

from mlxbatch.execution.attention.layout import AttentionSpec

_LOG2_E = 1.4426950408889634


def capped(scores: mx.array, spec: AttentionSpec) -> mx.array:
    return scores if spec.softcap is None else mx.tanh(scores / spec.softcap) * spec.softcap


def masked(scores: mx.array, mask: mx.array | None) -> mx.array:
    """A boolean mask keeps scores; a float one is added (0 or -inf), which is cheaper but for finite scores only."""
    if mask is None:
        return scores
    return mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask


def weights_of(scores: mx.array, sinks: mx.array | None) -> mx.array:
    """Softmax over the last axis of scores [..., K]. A sink, `sinks` [..., 1] up to broadcasting, takes its share
    and gives no value."""
    if sinks is None:
        return _softmax(scores)
    column = mx.broadcast_to(sinks.astype(mx.float32), (*scores.shape[:-1], 1))
    return _softmax(mx.concatenate([scores, column], axis=-1))[..., :-1]


def _softmax(scores: mx.array) -> mx.array:
    """By powers of two on a CPU: MLX's exp takes 20 ns a number there, its power 9 (x86-64)."""
    if mx.default_device() != mx.Device(mx.cpu):
        return mx.softmax(scores, axis=-1)
    powers = mx.power(2.0, (scores - scores.max(axis=-1, keepdims=True)) * _LOG2_E)
    return powers / powers.sum(axis=-1, keepdims=True)
