"""What `mlxbatch doctor` says about this machine: chip, memory limits, MLX, BLAS, and what is wrong with them."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlxbatch.capacity.chips import Chip, detect_chip
from mlxbatch.capacity.machine_memory import physical_memory
from mlxbatch.execution.backend import prepare_backend
from mlxbatch.units import format_bytes

LEAST_MACOS = (14, 0)  # MLX's own wheels need it


@dataclass(frozen=True, slots=True)
class MachineReport:
    """`facts` in the order of display; `advice` are things that the user may want to change."""

    facts: dict[str, str]
    numbers: dict[str, Any]
    has_gpu: bool
    bandwidth: float | None
    advice: tuple[str, ...] = field(default=())


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run(("sysctl", "-n", name), capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def machine_report(
    *,
    device_info: Callable[[], dict[str, Any]] | None = None,
    sysctl: Callable[[str], str] = _sysctl,
    system: str | None = None,
    chip: Chip | None = None,
) -> MachineReport:
    """Loads MLX. The parameters stand for the machine in tests."""
    system = system or platform.system()
    blas = prepare_backend()
    import mlx.core as mx

    has_gpu = mx.metal.is_available() if device_info is None else True
    info = dict(mx.device_info() if device_info is None else device_info())
    chip = chip or detect_chip(system=system)
    memory = int(info.get("memory_size") or physical_memory())
    advice: list[str] = []
    facts = {
        "machine": chip.name if chip else str(info.get("device_name") or platform.machine()),
        "system": f"macOS {platform.mac_ver()[0]}"
        if system == "Darwin"
        else f"{system} {platform.release()}",
        "memory": format_bytes(memory, binary=True),
    }
    numbers: dict[str, Any] = {"memory": memory, "chip": chip.key if chip else None, "device": info}
    facts["GPU"] = _gpu_line(has_gpu, info, chip)
    if system == "Darwin":
        working_set = int(info.get("max_recommended_working_set_size") or 0)
        facts["GPU working set"] = (
            f"{format_bytes(working_set, binary=True)}: what macOS lets the GPU hold without paging"
        )
        limit = sysctl("iogpu.wired_limit_mb")
        numbers["working_set"], numbers["iogpu_wired_limit_mb"] = working_set, limit
        facts["iogpu.wired_limit_mb"] = _wired_line(limit, memory)
        if limit in ("", "0") and memory >= 64 << 30:
            most = (memory >> 20) - 8192
            advice.append(
                f"a model that nearly fits: `sudo sysctl iogpu.wired_limit_mb={most}` lets the GPU hold all but "
                "8 GiB until the next restart. Leave macOS less and it may freeze"
            )
        version = tuple(int(part) for part in platform.mac_ver()[0].split(".")[:2] if part.isdigit())
        if version and version < LEAST_MACOS:
            advice.append(f"MLX needs macOS {LEAST_MACOS[0]} or newer")
        if platform.machine() != "arm64":
            advice.append(
                "this Python is not an arm64 one: MLX finds no GPU; install Python for Apple Silicon"
            )
    if system == "Linux":
        facts["BLAS"] = blas or "MLX's reference BLAS: 7 to 25 times slower in float32"
        if blas is None:
            advice.append(
                "install libopenblas0 (apt) or `pip install mkl`: float32 products are slow without"
            )
    else:
        facts["BLAS"] = "Accelerate"
    facts["MLX"] = f"{_version('mlx')}, mlx-lm {_version('mlx-lm')}"
    facts["Python"] = f"{platform.python_version()} ({sys.executable})"
    numbers["versions"] = {name: _version(name) for name in ("mlxbatch", "mlx", "mlx-lm")}
    numbers["blas"] = facts["BLAS"]
    facts["attention"] = (
        "Metal kernels, each checked at load" if has_gpu else "reference (plain MLX operations)"
    )
    return MachineReport(facts, numbers, has_gpu, chip.bandwidth if chip else None, tuple(advice))


def _gpu_line(has_gpu: bool, info: dict[str, Any], chip: Chip | None) -> str:
    if not has_gpu:
        return "none that MLX can use: everything runs on the CPU"
    architecture = str(info.get("architecture", "unknown"))
    parts = [architecture]
    if chip is not None:
        parts = [
            f"{chip.gpu_cores} cores, generation {chip.generation} ({architecture})",
            f"{format_bytes(chip.bandwidth)}/s",
        ]
    return ", ".join(parts)


def _wired_line(limit: str, memory: int) -> str:
    """What the limit means: GPU memory that macOS may not page out. 0 is macOS's own choice."""
    if not limit:
        return "unknown: this macOS has no such setting"
    if limit == "0":
        return "0, macOS's own limit (about two thirds to three quarters of the memory)"
    share = int(limit) * (1 << 20) / memory
    return f"{limit} ({share:.0%} of the memory), set by hand until the next restart"
