"""Which models are on this machine: the catalog, and huggingface_hub's cache."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxbatch.models.catalog import CatalogEntry, WheelSource, load_catalog
from mlxbatch.models.fetch import cached_path
from mlxbatch.models.progress import silent
from mlxbatch.models.source import LocalModel, local_model

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo


@dataclass(frozen=True)
class InventoryItem:
    """`nbytes` is what is on disk, 0 for a model that has not been fetched."""

    name: str
    source: str
    nbytes: int
    parameters: str | None = None
    architecture: str | None = None
    memory_gb: int | None = None
    license: str | None = None
    purpose: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def take_inventory() -> list[InventoryItem]:
    """The catalog, smallest machines first, then whatever else of the hub's cache can be loaded."""
    from mlxbatch.models.hub import cached_repositories

    cached = {repo.repo_id: repo for repo in cached_repositories()}
    items = [_of_entry(entry, cached) for entry in load_catalog().values()]
    known = {item.source for item in items}
    for name, repo in cached.items():
        if name not in known and _loadable(repo):
            items.append(InventoryItem(name, name, repo.size_on_disk))
    return items


def _of_entry(entry: CatalogEntry, cached: dict[str, CachedRepoInfo]) -> InventoryItem:
    if isinstance(entry.source, WheelSource):
        path = cached_path(entry.source)
        source, nbytes = f"PyPI {entry.source.package}", path.stat().st_size if path.is_file() else 0
    else:
        source = entry.source.repo
        nbytes = cached[source].size_on_disk if source in cached else 0
    return InventoryItem(
        name=entry.name,
        source=source,
        nbytes=nbytes,
        parameters=entry.parameters,
        architecture=entry.architecture,
        memory_gb=entry.memory_gb,
        license=entry.license,
        purpose=entry.purpose,
    )


def _loadable(repo: CachedRepoInfo) -> bool:
    names = {file.file_name for revision in repo.revisions for file in revision.files}
    return any(fnmatch(name, "model*.safetensors") or name.endswith(".gguf") for name in names)


def find_fetched(spec: str, revision: str | None = None) -> LocalModel | None:
    """The files of a model if they are on this machine, complete. Nothing is fetched."""
    from mlxbatch.models.hub import HubReference, find_in_cache

    source = entry.source if (entry := load_catalog().get(spec)) else None
    if isinstance(source, WheelSource):
        path = cached_path(source)
        return LocalModel(spec, path, "gguf") if path.is_file() else None
    path = Path(spec).expanduser()
    if source is None and path.exists():
        return local_model(path)
    reference = HubReference.parse(source.repo if source else spec, revision)
    found = find_in_cache(reference, silent) if reference else None
    return None if found is None else LocalModel(spec, found, "gguf" if found.suffix == ".gguf" else "directory")


def fetched_bytes(spec: str) -> int:
    """Bytes on disk of a fetched model; 0 if it is not there. A user's own files are never counted."""
    return next((item.nbytes for item in take_inventory() if spec in (item.name, item.source)), 0)


def remove_fetched(spec: str) -> int:
    """Delete a fetched model from the cache; the bytes freed."""
    from mlxbatch.models.hub import remove_from_hub_cache

    entry = load_catalog().get(spec)
    if entry is None:
        return remove_from_hub_cache(spec)
    if not isinstance(entry.source, WheelSource):
        return remove_from_hub_cache(entry.source.repo)
    path = cached_path(entry.source)
    nbytes = path.stat().st_size if path.is_file() else 0
    shutil.rmtree(path.parent, ignore_errors=True)
    return nbytes
