"""The `mlxbatch` command on an engine without a model: `python tests/e2e/fake_run.py run -i FILE -o FILE ...`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fake_engine import FakeEngine

from mlxbatch.cli import run
from mlxbatch.cli.main import main
from mlxbatch.config import EngineConfig


def open_fake_engine(config: EngineConfig, *, progress: Callable[[str], None], trace: bool) -> FakeEngine:
    return FakeEngine(config)


if __name__ == "__main__":
    run.engine_opener = lambda args, reporter, launch: open_fake_engine
    sys.exit(main())
