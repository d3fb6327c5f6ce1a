"""Where engine processes and their clients meet: one private directory per user, a few files per engine.

<runtime>/mlxbatch/                 mode 0700
  registry.lock                     held while an engine works out its budget
  <key>.lock                        held by the engine as long as it lives: the proof that it does
  <key>.start                       held by the client that starts it
  <key>.sock                        mode 0600
  <key>.json                        what it reserves (registry.py)
<logs>/mlxbatch/engine-<key>.log
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import platformdirs

from mlxbatch.config import EngineConfig
from mlxbatch.errors import EngineError
from mlxbatch.models.catalog import load_catalog

SOCKET_PATH_MAX = 103  # sun_path holds 104 bytes on macOS, one of them the closing NUL
KEY_LENGTH = 12


@dataclass(frozen=True, slots=True)
class EnginePaths:
    """The files of one engine."""

    key: str
    directory: Path
    log: Path

    @property
    def socket(self) -> Path:
        return self.directory / f"{self.key}.sock"

    @property
    def lock(self) -> Path:
        return self.directory / f"{self.key}.lock"

    @property
    def start_lock(self) -> Path:
        return self.directory / f"{self.key}.start"

    @property
    def record(self) -> Path:
        return self.directory / f"{self.key}.json"


@dataclass(frozen=True, slots=True)
class RuntimeDir:
    """The directory of one user's engines."""

    path: Path
    logs: Path

    @classmethod
    def of_user(cls) -> RuntimeDir:
        """The standard place; `path` is created if need be. Raises EngineError when another user could reach it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # platformdirs warns of a missing XDG_RUNTIME_DIR
            path = Path(platformdirs.user_runtime_dir("mlxbatch", appauthor=False))
        logs = Path(platformdirs.user_log_dir("mlxbatch", appauthor=False))
        return cls(path, logs).prepared()

    def prepared(self) -> RuntimeDir:
        """This directory, or a stand-in with a shorter name; it exists, is private and owned by this user."""
        path = self.path
        if len(os.fsencode(path)) + len(f"/{'k' * KEY_LENGTH}.sock") > SOCKET_PATH_MAX:
            digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
            root = Path("/tmp") if Path("/tmp").is_dir() else Path(tempfile.gettempdir())
            path = root / f"mlxbatch-{os.getuid()}-{digest}"
        _make_private(path)
        return replace(self, path=path)

    def engine(self, key: str) -> EnginePaths:
        return EnginePaths(key, self.path, self.logs / f"engine-{key}.log")

    def engines(self) -> list[EnginePaths]:
        """Every engine that ever left a lock file here, alive or not."""
        keys = sorted(file.stem for file in self.path.glob("*.lock"))
        return [self.engine(key) for key in keys if key != self.registry_lock.stem]

    @property
    def registry_lock(self) -> Path:
        return self.path / "registry.lock"


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise EngineError(
                f"{path} is not a directory of your own, so the engine's socket would not be safe there; "
                "remove it, or set XDG_RUNTIME_DIR to a private directory"
            )
        if status.st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise EngineError(f"cannot use {path} for the engine's socket: {error.strerror or error}") from None


def absolute_name(model: str) -> str:
    """A model's name that no longer depends on the working directory. A catalog name goes before a folder."""
    return model if model in load_catalog() else _resolved(model)


def _resolved(name: str) -> str:
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def absolute(config: EngineConfig) -> EngineConfig:
    """The config with model and adapter by absolute paths, where they are files."""
    adapter = _resolved(config.adapter) if config.adapter else config.adapter
    return replace(config, model=absolute_name(config.model), adapter=adapter)


def engine_key(config: EngineConfig) -> str:
    """Names the engine that serves `config`: alike for all settings that load the same weights.

    A client that asks for other limits joins the running engine, whose limits stay as they are.
    """
    config = absolute(config)
    identity = [config.model, config.revision, config.adapter, config.dtype, config.import_bits]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:KEY_LENGTH]


class FileLock:
    """An exclusive flock. The kernel lets go of it when its holder dies, however it dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def try_acquire(self) -> bool:
        return self._acquire(fcntl.LOCK_EX | fcntl.LOCK_NB)

    def acquire(self, timeout: float) -> bool:
        """Try for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self.try_acquire():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def wait(self) -> None:
        """Acquire it, however long that takes."""
        self._acquire(fcntl.LOCK_EX)

    def _acquire(self, operation: int) -> bool:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, operation)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_alive(paths: EnginePaths) -> bool:
    """Whether an engine process holds the lock. Never true by accident: process ids are not compared."""
    if not paths.lock.exists():
        return False
    descriptor = os.open(paths.lock, os.O_RDWR | os.O_CLOEXEC)
    try:
        # Shared, so that two observers do not take each other for an engine.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
