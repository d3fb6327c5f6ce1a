"""KV bytes, the pool's budget, and how it gives way under memory pressure."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxbatch.capacity.budget import MemoryBudget, activation_bytes
from mlxbatch.capacity.known_models import find_shape
from mlxbatch.capacity.kv_bytes import KVFormat, Workload, blocks_per_sequence, kv_bytes, tail_length
from mlxbatch.capacity.machine_memory import cgroup_limit, meminfo_bytes, physical_memory
from mlxbatch.capacity.pressure import Pressure, PressureGovernor, _read_linux

LLAMA = find_shape("llama-3.1-8b")


def test_sixteen_sequences_of_4096_tokens_of_llama_8b() -> None:
    memory = kv_bytes(LLAMA, Workload(16, 4096))
    assert memory.payload == 2 * 32 * 8 * 128 * 4096 * 2 * 16 == 8_589_934_592
    assert memory.scales == 0
    assert memory.tails == 2 * (16 + 1) * 32 * LLAMA.kv_bytes_per_token()
    assert memory.pending == 512 * LLAMA.kv_bytes_per_token()
    assert memory.growth * 64 == memory.payload + memory.zero_blocks  # K and V of 32 layers
    assert memory.zero_blocks == 16 * LLAMA.kv_bytes_per_token()
    assert memory.total == memory.pool + memory.tails + memory.pending + memory.growth


def test_eight_bit_blocks_halve_the_payload_and_list_their_scales() -> None:
    memory = kv_bytes(LLAMA, Workload(16, 4096), KVFormat(bits=8))
    assert memory.payload == 4_294_967_296
    blocks = 16 * 4096 // 16
    assert memory.scales == blocks * 32 * (8 * 128 + 8 * 16) * 4
    plain = kv_bytes(LLAMA, Workload(16, 4096))
    assert memory.tails == plain.tails  # tails keep full precision
    assert kv_bytes(LLAMA, Workload(16, 4096), KVFormat(bits=4)).payload == 2_147_483_648


def test_a_window_bounds_what_a_sequence_holds() -> None:
    shape = find_shape("gemma-3-27b")
    sliding = next(a for a in shape.attention_layers() if a.window)
    assert blocks_per_sequence(sliding, 128, 512, 16) == 8
    assert blocks_per_sequence(sliding, 100_000, 512, 16) == (1024 + 512) // 16 + 2
    long, longer = (kv_bytes(shape, Workload(1, n)).payload for n in (32_768, 65_536))
    full_layers = 10 * 2 * 16 * 128 * 2
    assert longer - long == 32_768 * full_layers


@pytest.mark.parametrize(("block", "expected"), [(4, 8), (8, 16), (16, 32), (32, 64)])
def test_tails_hold_a_nearly_full_block_and_the_steps_in_flight(block: int, expected: int) -> None:
    assert tail_length(block) == expected
    assert tail_length(block, q_max=8, steps_in_flight=3) >= block - 1 + 8 * 4


def test_recurrent_state_counts_for_each_slot_twice() -> None:
    shape = find_shape("qwen3-next-80b-a3b")
    assert kv_bytes(shape, Workload(3, 1024)).state == 2 * (4 + 1) * shape.state_bytes()


def budget(**changes: int) -> MemoryBudget:
    values = {"weights": 16_000, "activations": 500, "tails": 300, "pending": 200, "layers": 32, **changes}
    return MemoryBudget(working_set=100_000, utilization=0.9, **values)


def test_pool_and_its_growth_fill_what_is_left() -> None:
    b = budget()
    assert b.usable == 90_000
    room = 90_000 - 17_000
    assert b.pool == room * 32 // 33
    assert b.pool + b.growth <= room < b.pool + b.growth + 33
    assert budget(others=50_000).pool == (room - 50_000) * 32 // 33
    assert budget(weights=95_000).pool == 0


def test_budget_lines_add_up() -> None:
    lines = dict(budget().lines())
    spent = sum(v for k, v in lines.items() if k not in ("working set", "usable"))
    assert 0 <= lines["usable"] - spent <= 33


def test_activations_grow_with_tokens_and_vocabulary() -> None:
    small, large = (activation_bytes(LLAMA, n, 16) for n in (256, 512))
    assert large > small
    assert activation_bytes(LLAMA, 256, 32) - small == 16 * 2 * 128_256 * 4


# -- pressure ----------------------------------------------------------------------------------------------


def fake_proc(folder: Path, available_kb: int, stalled: float | None) -> Path:
    (folder / "pressure").mkdir(parents=True, exist_ok=True)
    (folder / "meminfo").write_text(f"MemTotal:  1000 kB\nMemAvailable:  {available_kb} kB\nHugePages_Total: 0\n")
    if stalled is not None:
        (folder / "pressure" / "memory").write_text(
            f"some avg10={stalled:.2f} avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 total=1\n"
        )
    return folder


def test_linux_pressure_from_meminfo_and_psi(tmp_path: Path) -> None:
    assert _read_linux(fake_proc(tmp_path / "a", 500, None)) == Pressure(0.5)
    assert _read_linux(fake_proc(tmp_path / "b", 500, 12.5)) == Pressure(0.5, 12.5)
    assert _read_linux(tmp_path / "nowhere") is None
    assert meminfo_bytes(tmp_path / "a") == {
        "MemTotal": 1_024_000,
        "MemAvailable": 512_000,
        "HugePages_Total": 0,
    }


def test_memory_of_a_container_is_its_limit(tmp_path: Path) -> None:
    assert cgroup_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert cgroup_limit(tmp_path) == 2**30
    assert physical_memory() > 2**28


class Readings:
    def __init__(self) -> None:
        self.now: Pressure | None = Pressure(0.5)

    def __call__(self) -> Pressure | None:
        return self.now


def test_governor_halves_under_pressure_waits_between_cuts_and_recovers_slowly() -> None:
    readings = Readings()
    governor = PressureGovernor(1_000_000, readings)
    assert governor.update(0.0) == 1_000_000
    readings.now = Pressure(0.05)
    assert governor.update(1.0) == 500_000
    assert governor.update(2.0) == 500_000  # the first cut must be felt before the next
    assert governor.update(7.0) == 250_000
    readings.now = Pressure(0.15)  # neither high nor low: hold
    assert governor.update(60.0) == 250_000
    readings.now = Pressure(0.6)
    assert governor.update(70.0) == 250_000  # calm since 60 s only
    assert governor.update(91.0) == 312_501
    for second in range(100, 2000, 10):
        governor.update(float(second))
    assert governor.budget == 1_000_000


def test_governor_never_goes_below_its_floor_and_holds_without_readings() -> None:
    readings = Readings()
    governor = PressureGovernor(640_000, readings)
    readings.now = Pressure(0.5, stalled=40.0)
    for second in range(0, 600, 10):
        governor.update(float(second))
    assert governor.budget == 10_000
    readings.now = None
    assert governor.update(1e6) == 10_000
