"""The engine process: `python -m mlxbatch.process.main`, started by launcher.py. Its stderr is the log."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mlxbatch import __version__
from mlxbatch.config import EngineConfig
from mlxbatch.models.progress import Progress
from mlxbatch.process.awake import raise_thread_priority
from mlxbatch.process.driver import EngineFactory, ServedEngine
from mlxbatch.process.paths import EnginePaths, FileLock, RuntimeDir, engine_key
from mlxbatch.process.registry import Registry
from mlxbatch.process.server import EngineServer, ServeOptions

log = logging.getLogger("mlxbatch.process")

LOCK_SECONDS = 2.0  # observers of the lock hold it for microseconds; an engine on its way out, for seconds


def serve(factory: EngineFactory, options: ServeOptions, registry: Registry, paths: EnginePaths) -> int:
    """Run an engine process to its end; returns its exit code. 0 at once if another one already runs."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname).1s %(name)s: %(message)s"
    )
    faulthandler.enable()
    lock = FileLock(paths.lock)
    if not lock.acquire(LOCK_SECONDS):
        log.info("another process already serves %s", options.model)
        return 0
    log.info("mlxbatch %s, process %d, serves %s", __version__, os.getpid(), options.model)
    server = EngineServer(paths, factory, options, registry)

    async def run() -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop, "asked", f"stopped by {number.name}")
        return await server.run()

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal that started it may close
    return asyncio.run(run())


def local_engine_factory(config: EngineConfig, registry: Registry, key: str) -> EngineFactory:
    """Builds the real engine, on the engine thread: fetch the model, then load it within what the machine has
    left beside other engines."""

    def build(progress: Progress) -> ServedEngine:
        from mlxbatch.process.loading import load_engine

        raise_thread_priority()
        return load_engine(config, registry, key, progress)

    return build


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mlxbatch.process.main", description=__doc__)
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--runtime", required=True, type=Path)
    parser.add_argument("--logs", required=True, type=Path)
    parser.add_argument("--idle-exit", default="1800", help="seconds, or never")
    parser.add_argument("--allow-sleep", action="store_true")
    args = parser.parse_args(arguments)
    config = msgspec.json.decode(args.config, type=EngineConfig)
    runtime = RuntimeDir(args.runtime, args.logs).prepared()
    registry = Registry(runtime)
    options = ServeOptions(
        model=config.model,
        idle_exit=None if args.idle_exit == "never" else float(args.idle_exit),
        allow_sleep=args.allow_sleep,
        settings=config.as_dict(),
    )
    paths = runtime.engine(engine_key(config))
    return serve(local_engine_factory(config, registry, paths.key), options, registry, paths)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # Not sys.exit: a step that never ends must not keep the process, nor MLX's threads be torn down under it.
    os._exit(code)
