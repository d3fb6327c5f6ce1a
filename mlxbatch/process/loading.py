"""Loading the real engine in its process, within what other engines leave of the machine. Imports mlx."""

from __future__ import annotations

from mlxbatch.config import EngineConfig
from mlxbatch.engine.local import LocalEngine
from mlxbatch.errors import ModelError
from mlxbatch.models.source import resolve
from mlxbatch.process.driver import Progress
from mlxbatch.process.registry import Registry, reserved, who_holds_what


def load_engine(config: EngineConfig, registry: Registry, key: str, progress: Progress) -> LocalEngine:
    """Fetch the model, then load it. Raises ModelError, with the list of those who hold memory if any do."""

    def fetching(what: str, done: int, total: int) -> None:
        progress(f"{what} {100 * done // total} %" if total else what)

    resolve(config.model, revision=config.revision, progress=fetching)  # others may load while this one fetches
    with registry.budgeting(lambda: progress("waiting for another engine that is loading")):
        others = registry.others(key)
        try:
            engine = LocalEngine(config, progress=progress, reserved_elsewhere=reserved(others))
        except ModelError as error:
            if reserved(others) == 0:
                raise
            raise ModelError(f"{error}\n{who_holds_what(others)}") from error
        registry.reserve(engine.reserved_bytes)
        return engine
