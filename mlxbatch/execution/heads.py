"""Only rows that are sampled reach the LM head.

A vocabulary projection of every prefill token would cost more than the rest of a small model, and its
logits more memory than the KV cache. The head is given a subclass of its own class that picks rows of the
hidden state first; parameters, names and quantisation stay as they are.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

_HEAD_NAMES = ("lm_head", "output")


class RowSelection:
    """Which rows the head computes in the next forward pass, along `axis`; None: all of them."""

    def __init__(self) -> None:
        self._rows: mx.array | None = None
        self._axis = 0
        self._applied = False

    def arm(self, rows: mx.array | None, axis: int = 0) -> None:
        self._rows, self._axis, self._applied = rows, axis, False

    def disarm(self, logits: mx.array) -> mx.array:
        """Back to all rows. `logits` are the model's output; if its head was not passed through, select now."""
        rows, self._rows = self._rows, None
        return logits if rows is None or self._applied else mx.take(logits, rows, axis=self._axis)

    def select(self, hidden: mx.array) -> mx.array:
        if self._rows is None:
            return hidden
        self._applied = True
        return mx.take(hidden, self._rows, axis=self._axis)


def select_rows_before_head(model: nn.Module) -> RowSelection:
    """Make the model's LM head (or tied embedding) compute only selected rows; returns the selection.

    A model whose head is not recognised computes all rows, and `disarm` picks from them.
    """
    found = _find_head(model)
    if found is None:
        return RowSelection()
    module, method = found
    existing = getattr(module, "_row_selection", None)
    if isinstance(existing, RowSelection):
        return existing
    selection = RowSelection()
    module._row_selection = selection
    module.__class__ = _selecting(type(module), method)
    return selection


def _find_head(model: nn.Module) -> tuple[Any, str] | None:
    modules = list(model.named_modules())
    for name, module in modules:
        if name.rpartition(".")[2] in _HEAD_NAMES and "layers" not in name.split("."):
            return module, "__call__"
    embeddings = [module for _, module in modules if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))]
    vocabulary = max(embeddings, key=lambda module: module.weight.shape[0], default=None)
    return None if vocabulary is None else (vocabulary, "as_linear")


def _selecting(base: type, method: str) -> type:
    original = getattr(base, method)

    def with_selected_rows(self: Any, hidden: mx.array) -> mx.array:
        return original(self, self._row_selection.select(hidden))

    return type(base.__name__, (base,), {method: with_selected_rows})
