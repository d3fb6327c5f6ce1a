"""How engines of different models share the memory of one machine.

An engine claims what it has use for (engine/memory_plan.py). One that finds less asks those that are idle to give
way, and takes back what is free again when it has requests. Only one engine at a time does either, under
`registry.lock`, so the claims of all never exceed the machine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from mlxbatch.engine.memory_plan import MemoryClaim
from mlxbatch.process.control import ask_to_give_way
from mlxbatch.process.driver import EngineDriver, ServedEngine
from mlxbatch.process.registry import EngineRecord, Registry, reserved

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0  # between two looks for memory to take back
STEP_SECONDS = 10.0  # a longer step is not waited for


def make_room(registry: Registry, key: str, claim: MemoryClaim) -> list[EngineRecord]:
    """The other engines, after idle ones gave way to `claim`, the longest idle first.

    They keep their cached blocks, but where even the least of the claim would not fit.
    """
    for wanted, evict in ((claim.full, False), (claim.least, True)):
        others = registry.others(key)
        spare = sorted((r for r in others if r.spare_bytes > 0), key=lambda r: r.idle_since or float("inf"))
        for record in spare:
            lacking = wanted + reserved(registry.others(key)) - claim.machine
            if lacking <= 0:
                break
            if ask_to_give_way(record, registry.runtime, lacking, evict=evict):
                log.info("%s gave way to this engine", record.model)
    return registry.others(key)


class MemoryShare:
    """The claim of this process's engine. Used on the socket thread; `on_loop` calls back to it."""

    def __init__(
        self, engine: ServedEngine, driver: EngineDriver, registry: Registry, key: str, on_loop: Callable[..., Any]
    ) -> None:
        self._engine = engine
        self._driver = driver
        self._registry = registry
        self._key = key
        self._on_loop = on_loop
        self._giving: asyncio.Future[None] | None = None
        self._taking: asyncio.Task[None] | None = None
        self._next_try = 0.0
        self._publish()

    @property
    def is_growing(self) -> bool:
        return self._taking is not None

    def give_way(self, lacking: int, *, evict: bool, done: Callable[[], None]) -> None:
        """Give up `lacking` bytes, or what can be had; then call `done`. The engine must be idle."""
        giving = self._giving = asyncio.get_running_loop().create_future()

        def gave() -> None:
            self._publish()
            giving.set_result(None)
            done()

        def shrink(engine: ServedEngine) -> None:
            engine.resize(engine.claim.reserved - max(0, lacking), evict=evict)
            self._on_loop(gave)

        self._next_try = 0.0
        self._driver.post(shrink)

    async def take_back(self) -> None:
        """Claim again what this engine once gave up, as far as it is free or idle engines give way."""
        if self._giving is not None:
            await asyncio.shield(self._giving)
        self.begin_to_take_back()
        if self._taking is not None:
            await asyncio.shield(self._taking)

    def begin_to_take_back(self) -> None:
        """The same without waiting."""
        short = self._engine.claim.reserved < self._engine.claim.full
        if short and self._taking is None and time.monotonic() >= self._next_try:
            self._taking = asyncio.get_running_loop().create_task(self._take_back())

    async def _take_back(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._grow)
        finally:
            self._taking = None
            self._next_try = time.monotonic() + RETRY_SECONDS

    def _grow(self) -> None:
        """On a thread of its own, because it waits for other processes and for the engine."""
        with self._registry.budgeting_now() as mine:
            claim = self._engine.claim
            if not mine or claim.reserved >= claim.full:
                return
            wanted = min(claim.full, claim.machine - reserved(make_room(self._registry, self._key, claim)))
            if wanted <= claim.reserved:
                return
            self._registry.reserve(wanted, claim.least)  # before it is used
            grown = threading.Event()

            def grow(engine: ServedEngine) -> None:
                engine.resize(wanted)
                grown.set()

            self._driver.post(grow)
            grown.wait(STEP_SECONDS)

    def _publish(self) -> None:
        self._registry.reserve(self._engine.claim.reserved, self._engine.claim.least)
