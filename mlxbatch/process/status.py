"""How a client stands with its engine, in words for the user; and when it gives up on one that keeps dying."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlxbatch.config import EngineConfig
from mlxbatch.process.messages import Loading, Stopping, Welcome

MAX_BARREN_RESTARTS = 3

LinkState = Literal["starting", "ready", "restarting", "lost"]


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """The way to the engine changed. `text` is for the user: what is being loaded, or why it is lost."""

    state: LinkState
    text: str = ""


class RestartBudget:
    """Allows any number of restarts, as long as tokens come between them: a request that kills every engine at
    once must not do so for ever."""

    def __init__(self, limit: int = MAX_BARREN_RESTARTS) -> None:
        self._limit = limit
        self._barren = 0

    def progressed(self) -> None:
        self._barren = 0

    def allows_another(self) -> bool:
        self._barren += 1
        return self._barren <= self._limit


def loading_status(message: Loading) -> LinkStatus:
    return LinkStatus("starting", message.text)


def restarting_status(unfinished: int) -> LinkStatus:
    if unfinished == 0:
        return LinkStatus("restarting", "the engine was lost; it is started again")
    resume = "1 request resumes where it" if unfinished == 1 else f"{unfinished} requests resume where they"
    return LinkStatus("restarting", f"the engine was lost; it is started again, and {resume} stopped")


def joined_status(welcome: Welcome, wanted: EngineConfig) -> LinkStatus:
    """For a client that joined a running engine, whose settings stay whatever this client asked for."""
    defaults = EngineConfig().as_dict()
    differing = [
        f"{name} {welcome.settings[name] or 'auto'} (not {value})"
        for name, value in wanted.as_dict().items()
        if value != defaults[name] and name in welcome.settings and welcome.settings[name] != value
    ]
    text = f"joined the running engine of {welcome.model}, process {welcome.engine_pid}"
    return LinkStatus("ready", f"{text}, which keeps {', '.join(differing)}" if differing else text)


def give_up_message(log: Path, stopping: Stopping | None) -> str:
    reason = f" ({stopping.message})" if stopping is not None and stopping.message else ""
    return (
        f"the engine died {MAX_BARREN_RESTARTS + 1} times in a row without a token in between{reason}; "
        f"its log is {log}"
    )
