"""Models on the Hugging Face hub, through huggingface_hub: its cache, its offline mode, its tokens.

A reference is OWNER/REPO, with an optional choice among the GGUF files of a repository:
OWNER/REPO:Q4_K_M, or OWNER/REPO:FILE.gguf.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CachedRepoInfo, HfApi, constants, scan_cache_dir, snapshot_download
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import tqdm

from mlxbatch.errors import ModelError
from mlxbatch.models.messages import shortened
from mlxbatch.models.progress import Progress

_REFERENCE = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?::([^:]+))?")
_WEIGHTS = "model*.safetensors"
# Never *.py, never a pickle: nothing that comes from a repository is run.
_DIRECTORY_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", _WEIGHTS]
_ADAPTER_FILES = ["adapter_config.json", "adapters.safetensors", "adapter_model.safetensors"]
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q8_0")
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class HubReference:
    """`choice` is a quantisation or file name among a repository's GGUF files; None if it was not named."""

    repo: str
    choice: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, text: str, revision: str | None = None) -> HubReference | None:
        """A reference, or None if `text` does not look like one."""
        match = _REFERENCE.fullmatch(text)
        return cls(match[1], match[2], revision) if match else None

    def __str__(self) -> str:
        return self.repo + (f":{self.choice}" if self.choice else "")


def fetch_from_hub(reference: HubReference, progress: Progress) -> Path:
    """A directory with config and safetensors, or a GGUF file, in huggingface_hub's cache.

    Files that are there already are not fetched again, and a download that was cut short goes on where it
    stopped. Without a network the cached files are used if they are complete. Raises ModelError.
    """
    try:
        names = HfApi().list_repo_files(reference.repo, revision=reference.revision)
    except Exception as error:  # offline, no longer public, or any trouble on the way
        cached = None if isinstance(error, HFValidationError) else find_in_cache(reference, progress)
        if cached is None:
            raise _explained(reference, error) from None
        return cached
    return _fetch(reference, names, progress, offline=False)


def fetch_adapter_from_hub(reference: HubReference, progress: Progress) -> Path:
    """The folder of an adapter in huggingface_hub's cache. Raises ModelError."""
    return _snapshot(reference, _ADAPTER_FILES, progress, offline=False)


def find_in_cache(reference: HubReference, progress: Progress) -> Path | None:
    """The same without asking the hub: None if the model is not in the cache, or not all of it."""
    try:
        return _fetch(reference, _cached_file_names(reference), progress, offline=True)
    except ModelError:
        return None


def _fetch(reference: HubReference, names: list[str], progress: Progress, *, offline: bool) -> Path:
    if any(fnmatch(name, _WEIGHTS) for name in names) and not reference.choice:
        return _snapshot(reference, _DIRECTORY_FILES, progress, offline)
    chosen = choose_gguf(reference, names)
    parts = [chosen]
    if match := _SPLIT.search(chosen):
        stem = chosen[: match.start()]
        parts = [f"{stem}-{part:05}-of-{match[2]}.gguf" for part in range(1, int(match[2]) + 1)]
    return _snapshot(reference, parts, progress, offline) / chosen


def choose_gguf(reference: HubReference, names: Iterable[str]) -> str:
    """The GGUF file of a repository that a reference means. Raises ModelError listing the choices."""
    files = [name for name in names if name.endswith(".gguf") and "mmproj" not in name.lower()]
    first_parts = [name for name in files if (m := _SPLIT.search(name)) is None or int(m[1]) == 1]
    if not first_parts:
        raise ModelError(f"{reference.repo} holds neither {_WEIGHTS} nor GGUF files, so there is nothing to load")
    wanted = [reference.choice] if reference.choice else list(_PREFERRED)
    for choice in wanted:
        exact = [name for name in first_parts if name == choice or name.rpartition("/")[2] == choice]
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(choice)}(?![A-Za-z0-9_])", re.IGNORECASE)
        matching = exact or [name for name in first_parts if pattern.search(name)]
        if len(matching) == 1:
            return matching[0]
        if len(matching) > 1:
            raise ModelError(f"{reference.repo} has several files for {choice!r}: {shortened(matching)}")
    if len(first_parts) == 1 and not reference.choice:
        return first_parts[0]
    asked = f"no file for {reference.choice!r}" if reference.choice else "several quantisations"
    raise ModelError(
        f"{reference.repo} has {asked}; choose with -m {reference.repo}:NAME from {shortened(first_parts)}"
    )


def cached_repositories() -> list[CachedRepoInfo]:
    """The model repositories in huggingface_hub's cache, by name."""
    try:
        found = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []
    return sorted(found, key=lambda repo: repo.repo_id)


def remove_from_hub_cache(repo: str) -> int:
    """Delete every cached revision of a repository; the bytes freed, 0 if there was nothing."""
    found = next((cached for cached in cached_repositories() if cached.repo_id == repo), None)
    if found is None:
        return 0
    plan = scan_cache_dir().delete_revisions(*(revision.commit_hash for revision in found.revisions))
    plan.execute()
    return int(plan.expected_freed_size)


def _cached_file_names(reference: HubReference) -> list[str]:
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=reference.repo, repo_type="model")
    commit = reference.revision or constants.DEFAULT_REVISION
    with contextlib.suppress(OSError):  # a branch or tag; else it is a commit already
        commit = (folder / "refs" / commit).read_text(encoding="utf-8").strip()
    root = folder / "snapshots" / commit
    return [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]


def _snapshot(reference: HubReference, patterns: list[str], progress: Progress, offline: bool) -> Path:
    try:
        path = snapshot_download(
            reference.repo,
            revision=reference.revision,
            allow_patterns=patterns,
            local_files_only=offline,
            tqdm_class=_reporting_tqdm(f"downloading {reference}", progress),
        )
    except Exception as error:
        raise _explained(reference, error) from None
    return Path(path)


def _explained(reference: HubReference, error: Exception) -> ModelError:
    """What went wrong, and what the user can do about it."""
    at = f"{reference.repo}" + (f" at revision {reference.revision}" if reference.revision else "")
    if isinstance(error, GatedRepoError):
        return ModelError(f"{at} is gated: accept its terms on its hub page, then log in with `hf auth login`")
    if isinstance(error, RevisionNotFoundError):
        return ModelError(f"the hub has no {at}")
    if isinstance(error, (RepositoryNotFoundError, HFValidationError)):
        return ModelError(
            f"the hub has no model {reference.repo}, or it is private (then log in with `hf auth login`); "
            "`mlxbatch models list` shows the catalog"
        )
    if isinstance(error, (LocalEntryNotFoundError, ConnectionError)):  # of which offline mode is one
        return ModelError(
            f"{at} is not (or not completely) in the cache, and the hub cannot be reached: check the network, "
            "and that offline mode (HF_HUB_OFFLINE) is off"
        )
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ModelError(
        f"cannot fetch {at}: {first_line}; what was fetched is kept, so trying again goes on from there"
    )


def _reporting_tqdm(what: str, progress: Progress) -> type[Any]:
    """A progress bar that draws nothing and reports bytes: huggingface_hub takes a tqdm class."""

    class Reporting(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": False})

        def display(self, *args: Any, **options: Any) -> bool:
            # Bytes on disk; a second bar, with bytes on the wire, would count them twice.
            if self.unit == "B" and not str(self.desc).startswith("Downloading bytes"):
                progress(what, int(self.n), int(self.total or 0))
            return True

        def close(self) -> None:
            self.display()
            self.leave = False
            self.disable = True

    return Reporting
