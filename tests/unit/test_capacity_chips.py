"""The chip table, and finding this machine in it."""

from __future__ import annotations

import pytest

from mlxbatch.capacity.chips import chip_table, detect_chip, find_chip
from mlxbatch.errors import UsageError


def test_m2_ultra() -> None:
    chip = find_chip("m2-ultra")
    assert chip.flops == pytest.approx(27.2e12, rel=1e-3)
    assert chip.bandwidth == 800e9
    assert chip.memory == tuple(n * 2**30 for n in (64, 128, 192))
    assert (chip.generation, chip.size) == (14, "d")
    assert (chip.default_rows(moe=False), chip.default_rows(moe=True)) == (32, 16)


@pytest.mark.parametrize("name", ["M2 Ultra", "apple m2 ultra", "m2_ultra", " M2-ULTRA "])
def test_names_as_people_write_them(name: str) -> None:
    assert find_chip(name).key == "m2-ultra"


def test_unknown_chips_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown chip 'm9'.*m2-ultra.*rtx4090"):
        find_chip("m9")


def test_every_family_is_there_with_sane_figures() -> None:
    table = chip_table()
    for family in ("m1", "m2", "m3", "m4", "m5"):
        assert {family, f"{family}-pro", f"{family}-max"} <= set(table)
    assert {"m1-ultra", "m2-ultra", "m3-ultra", "a100", "rtx4090"} <= set(table)
    for chip in table.values():
        assert list(chip.memory) == sorted(chip.memory)
        assert 8 <= chip.flops / chip.bandwidth <= 100, chip.key
        assert chip.matmul_flops >= chip.flops
        assert 0 < chip.rows_moe <= chip.rows_dense
        for memory in chip.memory:
            assert memory / 2 < chip.working_set(memory) <= memory


def mac(brand: str, cores: int) -> object:
    def run(*command: str) -> str:
        return f"{brand}\n" if command[0] == "sysctl" else f'    "gpu-core-count" = {cores}\n'

    return run


@pytest.mark.parametrize(
    ("brand", "cores", "key"),
    [
        ("Apple M2 Ultra", 76, "m2-ultra"),
        ("Apple M2 Ultra", 60, "m2-ultra-60"),
        ("Apple M4 Max", 32, "m4-max-32"),
        ("Apple M1", 7, "m1"),
    ],
)
def test_a_mac_finds_its_bin(brand: str, cores: int, key: str) -> None:
    chip = detect_chip(mac(brand, cores), system="Darwin")  # type: ignore[arg-type]
    assert chip is not None
    assert chip.key == key


def test_other_machines_are_in_no_table() -> None:
    assert detect_chip(system="Linux") is None
    assert detect_chip(mac("Apple M99", 10), system="Darwin") is None  # type: ignore[arg-type]
