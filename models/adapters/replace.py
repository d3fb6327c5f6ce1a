"""How adapters change a module: by a subclass of its class, so that parameters and names stay as they are."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn


def is_paged(cache: Any) -> bool:
    """Whether a layer's cache is one of mlxbatch's, which attend by themselves."""
    return hasattr(cache, "attend")


def replace_class(model: nn.Module, old: type, new: type) -> None:
    """Every module of `model` that is exactly an `old` becomes a `new`, a subclass of it."""
    for _, module in model.named_modules():
        if type(module) is old:
            module.__class__ = new
