"""Typed access to the metadata of a GGUF file: every value is checked before it is used."""

from __future__ import annotations

import math
from typing import Any

from mlxbatch.errors import ModelError
from mlxbatch.models.gguf_file import GgufFile


class Metadata:
    """Keys are looked up under the architecture's prefix: `count("block_count")` is `llama.block_count`."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture", ""))

    def refuse(self, what: str) -> ModelError:
        return ModelError(f"{self.file.path}: {what}")

    def value(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        full = f"{self.architecture}.{key}"
        value = self.file.metadata.get(full, default)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise self.refuse(f"metadata {full} is {value!r:.80}, which is not supported")
        return value

    def count(self, key: str, default: int | None = None, limit: int = 1 << 24) -> int:
        """A positive whole number, at most `limit`."""
        value = self.value(key, int, default)
        if value is None:
            raise self.refuse(f"metadata {self.architecture}.{key} is missing")
        if not 0 < value <= limit:
            raise self.refuse(f"metadata {self.architecture}.{key} is {value}, not 1 to {limit}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key, (int, float), default)
        if value is None or not math.isfinite(value):
            raise self.refuse(f"metadata {self.architecture}.{key} is missing or not a finite number")
        return float(value)
