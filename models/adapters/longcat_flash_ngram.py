"""LongCat's n-gram embedding keeps the last tokens of a sequence, fewer of them at its start.

A slot's state has one size. The embedding treats missing tokens as zeros, so a full context of zeros, put in
place of none, gives the same.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import longcat_flash_ngram

from mlxbatch.models.adapters.replace import replace_class


class FixedSizeEmbedding(longcat_flash_ngram.NgramEmbedding):
    def __call__(self, input_ids: mx.array, cache: Any = None) -> mx.array:
        if cache is not None and cache[0] is None:
            cache[0] = mx.zeros((input_ids.shape[0], self.n - 1), mx.int64)
        return super().__call__(input_ids, cache)


def adapt(model: nn.Module) -> None:
    replace_class(model, longcat_flash_ngram.NgramEmbedding, FixedSizeEmbedding)
