"""How much memory this machine has, without asking MLX."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def meminfo_bytes(proc: Path = Path("/proc")) -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    try:
        text = (proc / "meminfo").read_text()
    except OSError:
        return {}
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            values[name] = int(fields[0]) * (1024 if fields[-1] == "kB" else 1)
    return values


def cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The memory limit of this process's container; None if there is none."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:
            return int(text)
    return None


def physical_memory() -> int:
    """Bytes of memory that this machine (or its container) has."""
    if platform.system() == "Darwin":
        try:
            done = subprocess.run(
                ("sysctl", "-n", "hw.memsize"), capture_output=True, text=True, timeout=2, check=False
            )
            return int(done.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            pass
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_limit()
    return min(total, limit) if limit else total
