"""The shape of whatever -m names, without loading it: catalog names, GGUF files, and what capacity/ knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxbatch.capacity.model_shape import ModelShape


def shape_of(model: str) -> ModelShape:
    """The shape behind a catalog name, a .gguf file, a config.json, a folder, or a known or downloaded repository.

    A catalog name means what `mlxbatch run` would load: its repository's quantisation. Raises ModelError.
    """
    from mlxbatch.capacity.known_models import find_shape
    from mlxbatch.capacity.model_families import read_shape

    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        from mlxbatch.models.gguf_config import build_config
        from mlxbatch.models.gguf_file import read_gguf

        return read_shape(build_config(read_gguf(path)), path.stem)
    if not path.exists():
        from mlxbatch.models.catalog import HubSource, load_catalog

        entry = load_catalog().get(model)
        if entry is not None and isinstance(entry.source, HubSource):
            return replace(find_shape(entry.source.repo), name=model)
    return find_shape(model)
