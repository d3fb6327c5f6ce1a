"""Loading the real engine in its process, within what other engines leave of the machine. Imports mlx."""

from __future__ import annotations

from mlxbatch.config import EngineConfig
from mlxbatch.engine.local import LocalEngine
from mlxbatch.engine.memory_plan import MemoryClaim
from mlxbatch.errors import NoRoomError
from mlxbatch.models.progress import Progress
from mlxbatch.models.source import resolve
from mlxbatch.process.registry import Registry, reserved, who_holds_what
from mlxbatch.process.room import make_room


def load_engine(config: EngineConfig, registry: Registry, key: str, progress: Progress) -> LocalEngine:
    """Fetch the model, then load it. Raises ModelError; one that finds too little memory says who
    holds it."""

    def neighbours(claim: MemoryClaim) -> int:
        return reserved(make_room(registry, key, claim))

    resolve(config.model, revision=config.revision, progress=progress)  # others may load while this one fetches
    with registry.budgeting(lambda: progress("waiting for another engine that is loading", 0, 0)):
        try:
            engine = LocalEngine(config, progress=progress, neighbours=neighbours)
        except NoRoomError as error:
            others = registry.others(key)
            if reserved(others) == 0:
                raise
            raise NoRoomError(f"{error}\n{who_holds_what(others)}") from error
        registry.reserve(engine.claim.reserved, engine.claim.least)
        return engine
