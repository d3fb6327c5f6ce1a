"""The chip table, and which chip this machine has."""

from __future__ import annotations

import platform
import re
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from mlxbatch.errors import UsageError

LANES_PER_CORE = 128  # float32 lanes of an Apple GPU core


@dataclass(frozen=True, slots=True)
class Chip:
    """One GPU. `flops` and `matmul_flops` count a multiply-add as two; `memory` lists the sizes sold."""

    key: str
    name: str
    vendor: str
    generation: int
    size: str
    gpu_cores: int
    flops: float
    matmul_flops: float
    bandwidth: float
    memory: tuple[int, ...]
    rows_dense: int
    rows_moe: int

    @property
    def is_apple(self) -> bool:
        return self.vendor == "apple"

    @property
    def lane_rate(self) -> float:
        """Lane operations per second: one multiply-add is one operation."""
        return self.flops / 2

    def default_rows(self, *, moe: bool) -> int:
        """The cap on rows before anything is measured."""
        return self.rows_moe if moe else self.rows_dense

    def working_set(self, memory: int) -> int:
        """Bytes that the GPU should use of `memory`, before anybody asked Metal.

        macOS recommends about two thirds of the memory up to 36 GiB and three quarters above (observed values
        of MTLDevice.recommendedMaxWorkingSetSize, e.g. 10.67 GiB of 16); the engine asks Metal itself.
        """
        if not self.is_apple:
            return memory
        return memory * 2 // 3 if memory <= 36 * 2**30 else memory * 3 // 4


def _chip(key: str, entry: Mapping[str, object]) -> Chip:
    def number(name: str, default: float | None = None) -> float:
        value = entry.get(name, default)
        if not isinstance(value, (int, float)):
            raise ValueError(f"chips.toml: {key} has no number {name}")
        return float(value)

    flops = number("flops", number("gpu_cores") * LANES_PER_CORE * 2 * number("clock", 0.0))
    rows = entry["rows"]
    memory = entry["memory"]
    if not isinstance(rows, dict) or not isinstance(memory, list):
        raise ValueError(f"chips.toml: {key} needs rows and memory")
    return Chip(
        key=key,
        name=str(entry["name"]),
        vendor=str(entry["vendor"]),
        generation=int(number("generation")),
        size=str(entry["size"]),
        gpu_cores=int(number("gpu_cores")),
        flops=flops,
        matmul_flops=flops * number("matmul_ratio", 1.0),
        bandwidth=number("bandwidth"),
        memory=tuple(int(size) for size in memory),
        rows_dense=int(rows["dense"]),
        rows_moe=int(rows["moe"]),
    )


@cache
def chip_table() -> Mapping[str, Chip]:
    """All chips by key, in the order of the file."""
    text = resources.files("mlxbatch.capacity").joinpath("chips.toml").read_text("utf-8")
    return {key: _chip(key, entry) for key, entry in tomllib.loads(text)["chips"].items()}


def find_chip(name: str) -> Chip:
    """The chip called "m2-ultra", "M2 Ultra", "Apple M2 Ultra" or "rtx4090". Raises UsageError."""
    key = re.sub(r"[\s_]+", "-", name.strip().lower()).removeprefix("apple-").removeprefix("nvidia-")
    key = {"a100-80gb": "a100", "rtx-4090": "rtx4090", "4090": "rtx4090"}.get(key, key)
    chip = chip_table().get(key)
    if chip is None:
        known = ", ".join(chip_table())
        raise UsageError(f"unknown chip {name!r}; known chips: {known}")
    return chip


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def detect_chip(run: Callable[..., str] = _run, system: str | None = None) -> Chip | None:
    """This machine's chip, or None if it is not in the table (any machine but a Mac). Loads no MLX.

    The number of GPU cores picks the bin, so that a 60-core M2 Ultra is not taken for one of 76.
    """
    if (system or platform.system()) != "Darwin":
        return None
    brand = run("sysctl", "-n", "machdep.cpu.brand_string").strip()
    candidates = [chip for chip in chip_table().values() if chip.name == brand]
    if not candidates:
        return None
    match = re.search(r'"gpu-core-count"\s*=\s*(\d+)', run("ioreg", "-rc", "AGXAccelerator", "-d", "1"))
    cores = int(match[1]) if match else candidates[0].gpu_cores
    return min(candidates, key=lambda chip: abs(chip.gpu_cores - cores))
