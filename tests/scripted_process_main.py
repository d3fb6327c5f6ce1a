"""An engine process that serves a ScriptedEngine: what launcher.engine_command starts, with a script instead."""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path

import msgspec
from scripted_process_engine import Script, ScriptedEngine

from mlxbatch.config import EngineConfig
from mlxbatch.errors import EngineError
from mlxbatch.models.progress import Progress
from mlxbatch.process.main import serve
from mlxbatch.process.paths import RuntimeDir, engine_key
from mlxbatch.process.registry import Registry
from mlxbatch.process.server import ServeOptions


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--runtime", required=True, type=Path)
    parser.add_argument("--logs", required=True, type=Path)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--crash-after", type=int)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--fail", help="fail to load, with this message")
    parser.add_argument("--die-loading", action="store_true")
    parser.add_argument("--count", type=Path, help="a line is added to this file for each engine that loads")
    parser.add_argument("--idle-exit", type=float)
    args = parser.parse_args()
    config = msgspec.json.decode(args.config, type=EngineConfig)

    def factory(progress: Progress) -> ScriptedEngine:
        if args.count:
            with args.count.open("a") as file:
                file.write(f"{os.getpid()}\n")
        progress(f"loading {config.model}", 0, 0)
        time.sleep(args.load_seconds)
        if args.die_loading:
            os.abort()
        if args.fail:
            raise EngineError(args.fail)
        return ScriptedEngine(Script(pace=args.pace, crash_after=args.crash_after))

    options = ServeOptions(model=config.model, idle_exit=args.idle_exit)
    runtime = RuntimeDir(args.runtime, args.logs).prepared()
    return serve(factory, options, Registry(runtime), runtime.engine(engine_key(config)))


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)
