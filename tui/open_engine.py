"""Links to real engines, and which models can be chosen. Nothing here loads mlx or transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mlxbatch.config import EngineConfig
from mlxbatch.models.catalog import load_catalog
from mlxbatch.process.async_client import AsyncEngineClient
from mlxbatch.process.launcher import Launcher, LaunchOptions
from mlxbatch.process.messages import ClientKind
from mlxbatch.process.paths import RuntimeDir
from mlxbatch.process.registry import Registry
from mlxbatch.tui.engine_link import EngineLink


def link_factory(
    config: EngineConfig, options: LaunchOptions, *, kind: ClientKind = "chat", start_engine: bool = True
) -> Callable[[str], EngineLink]:
    """Links by model name, each with the limits of `config`."""

    def make(model: str) -> EngineLink:
        launcher = Launcher(replace(config, model=model), options=options)
        return AsyncEngineClient(launcher, kind=kind, title=kind, start_engine=start_engine)

    return make


def model_choices() -> list[tuple[str, str]]:
    """(name, description) of the models that engines hold now, then of the catalog."""
    choices: dict[str, str] = {}
    for record in Registry(RuntimeDir.of_user()).live():
        choices[record.model] = "loaded in a running engine"
    for entry in load_catalog().values():
        choices.setdefault(entry.name, f"{entry.parameters} · from {entry.memory_gb} GB · {entry.purpose}")
    return list(choices.items())


def running_models() -> list[str]:
    """Models that engines hold now, the one that started last first."""
    records = sorted(Registry(RuntimeDir.of_user()).live(), key=lambda record: -record.started)
    return [record.model for record in records]
