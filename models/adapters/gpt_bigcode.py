"""GPT BigCode makes its positions on the host, one sequence's at a time."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gpt_bigcode
from mlx_lm.models.base import create_attention_mask

from mlxbatch.models.adapters.replace import is_paged, replace_class


class PagedModel(gpt_bigcode.GPTBigCodeModel):
    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        if cache is None or not is_paged(cache[0]):
            return super().__call__(inputs, cache)
        hidden = self.wte(inputs)
        mask = create_attention_mask(hidden, cache[0])
        hidden = hidden + self.wpe(cache[0].offset[:, None] + mx.arange(inputs.shape[1]))
        for layer, own in zip(self.h, cache, strict=True):
            hidden = layer(hidden, mask, cache=own)
        return self.ln_f(hidden)


def adapt(model: nn.Module) -> None:
    replace_class(model, gpt_bigcode.GPTBigCodeModel, PagedModel)
