"""The real engines: links to them, what runs, what can be chosen. Loads neither mlx nor transformers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from mlxbatch.config import EngineConfig
from mlxbatch.models.catalog import load_catalog
from mlxbatch.process.async_client import AsyncEngineClient
from mlxbatch.process.control import find_engine, stop_engine
from mlxbatch.process.launcher import Launcher, LaunchOptions
from mlxbatch.process.messages import ClientKind
from mlxbatch.process.paths import RuntimeDir
from mlxbatch.process.registry import EngineRecord, Registry
from mlxbatch.tui.engine_link import EngineLink
from mlxbatch.units import format_bytes, format_seconds


def link_factory(
    config: EngineConfig, options: LaunchOptions, *, kind: ClientKind = "chat", start_engine: bool = True
) -> Callable[[str], EngineLink]:
    """Links by model name, each with the limits of `config`."""

    def make(model: str) -> EngineLink:
        launcher = Launcher(replace(config, model=model), options=options)
        return AsyncEngineClient(launcher, kind=kind, title=kind, start_engine=start_engine)

    return make


class Machine:
    """The engines of this user on this machine, and the models that could be loaded."""

    def __init__(self, runtime: RuntimeDir | None = None) -> None:
        self._runtime = runtime or RuntimeDir.of_user()
        self._registry = Registry(self._runtime)

    def model_choices(self) -> list[tuple[str, str]]:
        """(name, description): models that engines hold now, then those of the catalog."""
        now = time.time()
        choices = {record.model: describe_engine(record, now) for record in self._registry.live()}
        for entry in load_catalog().values():
            choices.setdefault(entry.name, f"{entry.parameters} · {entry.memory_gb} GB · {entry.purpose}")
        return list(choices.items())

    def running_models(self) -> list[str]:
        """Models that engines hold now, the one that started last first."""
        return [record.model for record in reversed(self._registry.live())]

    def idle_models(self) -> dict[str, str]:
        """Models whose engines nobody uses, with what stopping them would free."""
        return {
            record.model: format_bytes(record.reserved_bytes)
            for record in self._registry.live()
            if record.idle_since is not None
        }

    def stop(self, model: str) -> None:
        """Stop an idle engine and wait until it is gone. Raises EngineError, also when it is in use."""
        stop_engine(find_engine(self._registry.live(), model), self._runtime)


def describe_engine(record: EngineRecord, now: float) -> str:
    idle = record.idle_seconds(now)
    use = f"idle {format_seconds(idle)}" if idle is not None else f"in use by {record.clients}"
    held = f", holds {format_bytes(record.reserved_bytes)}" if record.reserved_bytes else ""
    return f"loaded{held} · {use}"
