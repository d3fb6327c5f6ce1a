"""Imports point one way, and what must start quickly or run anywhere never loads MLX."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mlxbatch"

# A module may import from its own package and from rows above its own.
LAYERS = (
    {"errors"},
    {"request", "config", "units"},
    {"json_values"},
    {"settings", "scheduling", "history"},
    {"capacity"},
    {"execution", "models", "metal_kernels"},
    {"engine"},
    {"simulate", "process"},
    {"batch", "llm", "tui", "bench"},
    {"cli"},
    {"__main__"},
)
PURE = ("scheduling", "capacity", "simulate", "history", "batch", "tui", "cli", "process")
PURE_MODULES = ("request", "config", "settings", "units", "errors", "engine.api", "engine.snapshot", "engine.metrics")
ENGINE_SIDE = {"mlxbatch.process.loading"}  # imported in the engine process only, when it loads a model
HEAVY = {"mlx", "mlx_lm", "transformers"}


def source_files(top: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(top, followlinks=True):
        yield from (Path(folder) / name for name in sorted(names) if name.endswith(".py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def runtime_imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import outside `if TYPE_CHECKING`, inside functions too."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        yield node
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    for node in walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            if node.module == "mlxbatch":
                yield from ((node.lineno, f"mlxbatch.{alias.name}") for alias in node.names)


def layer_of(name: str) -> int:
    part = name.split(".")[1]
    return next(number for number, layer in enumerate(LAYERS) if part in layer)


def test_every_part_has_a_layer() -> None:
    parts = {
        path.stem if path.is_file() else path.name
        for path in PACKAGE.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").is_file()) and path.name != "__init__.py"
    }
    assert parts == set().union(*LAYERS)


def test_imports_point_one_way() -> None:
    wrong = []
    for path in source_files(PACKAGE):
        name = module_name(path)
        if name == "mlxbatch":
            continue  # it re-exports LLM, lazily
        for line, imported in runtime_imports(path):
            parts = imported.split(".")
            if parts[0] != "mlxbatch" or len(parts) == 1 or parts[1].startswith("__"):
                continue
            if parts[1] != name.split(".")[1] and layer_of(imported) >= layer_of(name):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {imported}")
    assert not wrong


IMPORT_ALL = "import importlib, json, sys; [importlib.import_module(m) for m in json.loads(sys.argv[1])]"


@pytest.mark.parametrize("part", [*PURE, PURE_MODULES], ids=lambda part: part if isinstance(part, str) else "modules")
def test_pure_parts_never_load_mlx(part: str | tuple[str, ...]) -> None:
    if isinstance(part, str):
        # __main__ modules run a program when they are imported.
        found = {module_name(path) for path in source_files(PACKAGE / part) if path.stem != "__main__"}
        modules = sorted(found - ENGINE_SIDE)
    else:
        modules = [f"mlxbatch.{name}" for name in part]
    code = f"{IMPORT_ALL}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(modules)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(json.loads(done.stdout))
