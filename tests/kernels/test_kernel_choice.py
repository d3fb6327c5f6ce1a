"""Which attention serves, what happens to kernels that do not run or are wrong, and the doctor's table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from bench import Bench
from oracle import TOLERANCE, deviation
from quick_compile import quick_to_compile
from scene import Case, run_decode, run_prefill

from mlxbatch.cli import doctor
from mlxbatch.cli.main import main
from mlxbatch.errors import UsageError
from mlxbatch.execution.attention.choice import CheckedAttention, choose_attention, what_kernels_lack
from mlxbatch.execution.attention.layout import AttentionSpec
from mlxbatch.execution.attention.metal import MetalAttention
from mlxbatch.execution.attention.metal_report import KernelRow, report_kernels, standard_variants
from mlxbatch.execution.attention.metal_source import Kernel, KernelFactory
from mlxbatch.execution.attention.reference import ReferenceAttention
from mlxbatch.execution.machine_report import machine_report
from mlxbatch.execution.matmul_report import report_matmul
from mlxbatch.execution.quantized_linear import SmallBatchKernel

SMALL = Case(key_dim=64, value_dim=64, dtype="float32")
LATENT = Case(latent=True, dtype="float32")


def checked(
    factory: KernelFactory, reports: list[str], prefer: Callable[..., bool] | None = None
) -> CheckedAttention:
    metal = MetalAttention(factory, chunk_tokens=32, own_prefill=True)
    return CheckedAttention(
        metal, ReferenceAttention(), chunk_tokens=32, report=reports.append, prefer=prefer
    )


def run_all(attention: CheckedAttention) -> None:
    """Every operation gives the oracle's result, whoever serves."""
    for case in (SMALL, LATENT):
        assert deviation(*run_decode(attention, case, [70, 5])) <= TOLERANCE["float32"]
        assert deviation(*run_prefill(attention, case, 37, 6)) <= TOLERANCE["float32"]


def test_right_kernels_serve(bench: Bench) -> None:
    reports: list[str] = []
    attention = checked(quick_to_compile(bench.metal_kernel), reports)
    run_all(attention)
    assert reports == [] and attention.replaced == ()
    bench.reports.clear()
    run_all(attention)  # now without checks: 2 decodes with their merges, 2 prefills
    assert len(bench.reports) == 6


@pytest.mark.parametrize(
    "name", ["paged_attention_decode", "paged_attention_prefill", "paged_attention_latent"]
)
def test_a_kernel_that_does_not_compile_is_replaced(bench: Bench, name: str) -> None:
    def refusing(**names: Any) -> Kernel:
        def refuse(**call: Any) -> list[mx.array]:
            raise RuntimeError(
                "[metal::Device] Unable to build metal library from source\nprogram_source:1: error"
            )

        return refuse if names["name"] == name else quick_to_compile(bench.metal_kernel)(**names)

    reports: list[str] = []
    attention = checked(refusing, reports)
    run_all(attention)
    run_all(attention)
    operations = 2 if name == "paged_attention_latent" else 1
    assert len(attention.replaced) == len(reports) == operations, "each is reported once"
    assert "does not run ([metal::Device] Unable to build metal library from source)" in reports[0]
    assert "the reference serves" in reports[0]


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("paged_attention_decode", "position % tail_len", "position % (tail_len - 1)"),
        ("paged_attention_merge", "+= part_value[s][channel]", "+= part_value[0][channel]"),
        ("paged_attention_prefill", "position - start) * width", "position - start + 1) * width"),
        ("paged_attention_latent", "scores[tile][0] *= factors[0]", "scores[tile][0] *= 2 * factors[0]"),
    ],
)
def test_a_wrong_kernel_is_replaced(bench: Bench, name: str, right: str, wrong: str) -> None:
    def sabotaged(*, header: str, source: str, **names: Any) -> Kernel:
        if names["name"] == name:
            assert right in header + source
            header, source = header.replace(right, wrong), source.replace(right, wrong)
        return quick_to_compile(bench.metal_kernel)(header=header, source=source, **names)

    bench.configure(raise_on_findings=False)  # some of these read what they should not
    reports: list[str] = []
    attention = checked(sabotaged, reports)
    run_all(attention)
    assert reports and all("is off by" in line or "does not run" in line for line in reports)
    assert len(attention.replaced) == len(reports)


def test_slower_kernels_are_not_used(bench: Bench) -> None:
    reports: list[str] = []
    attention = checked(
        quick_to_compile(bench.metal_kernel),
        reports,
        prefer=lambda variant, *_: variant.operation == "decode",
    )
    run_all(attention)
    assert reports == []
    assert sorted(name.partition(",")[0] for name in attention.replaced) == [
        "decode latent",
        "prefill",
        "prefill latent",
    ]


def test_blocks_of_four_go_to_the_reference(bench: Bench) -> None:
    reports: list[str] = []
    attention = checked(bench.metal_kernel, reports)
    assert (
        deviation(*run_decode(attention, Case(block_size=4, dtype="float32"), [30])) <= TOLERANCE["float32"]
    )
    assert "multiples of 8" in reports[0]


def test_what_kernels_lack() -> None:
    latent = next(variant for variant in standard_variants() if variant.is_latent)
    assert what_kernels_lack(latent) is None
    assert "512 + 64" in str(what_kernels_lack(replace(latent, key_dim=256, value_dim=32)))
    assert "soft-cap" in str(what_kernels_lack(replace(latent, spec=AttentionSpec(0.1, softcap=20.0))))
    assert [v.name for v in standard_variants() if what_kernels_lack(v)] == []


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has a GPU")
def test_choice_without_a_gpu() -> None:
    assert isinstance(choose_attention("auto"), ReferenceAttention)
    assert isinstance(choose_attention("reference"), ReferenceAttention)
    with pytest.raises(UsageError, match="needs an Apple GPU"):
        choose_attention("metal")


def test_standard_variants_cover_every_operation() -> None:
    variants = standard_variants()
    assert len({variant.name for variant in variants}) == len(variants)
    assert {v.operation for v in variants} == {"decode", "prefill", "decode_latent", "prefill_latent"}


def test_the_doctor_checks_kernels_on_the_bench(bench: Bench) -> None:
    """A few of the variants here; all of them on a Mac, and in the slow test."""
    picked = [v for v in standard_variants() if v.bits == 4 or v.key_dim == 112 or v.q_len == 8]
    kernels = MetalAttention(quick_to_compile(bench.metal_kernel), chunk_tokens=32, own_prefill=True)
    rows = list(report_kernels(kernels, ReferenceAttention(), timed=False, variants=picked, chunk_tokens=32))
    assert [row.problem for row in rows] == [None] * len(picked)
    assert all(row.deviation is not None and row.deviation <= row.tolerance for row in rows)


def test_the_doctor_checks_matmuls_on_the_bench(bench: Bench) -> None:
    rows = list(report_matmul(SmallBatchKernel(quick_to_compile(bench.metal_kernel)), timed=False, size=128))
    assert [(row.variant, row.problem) for row in rows if row.problem] == []
    assert all(row.deviation is not None and row.deviation < 1e-3 for row in rows) and len(rows) == 6


@pytest.mark.slow
def test_the_doctor_checks_every_kernel_on_the_bench(bench: Bench) -> None:
    kernels = MetalAttention(quick_to_compile(bench.metal_kernel), chunk_tokens=32, own_prefill=True)
    rows = list(report_kernels(kernels, ReferenceAttention(), timed=False, chunk_tokens=32))
    assert [row.variant for row in rows if row.problem] == []


def test_the_doctor_times_what_is_right() -> None:
    """The reference in both places: right, and timed."""
    (variant,) = [
        v for v in standard_variants() if v.name == "decode, float32, heads 8/2, dims 128/128, blocks of 16"
    ]
    (row,) = report_kernels(ReferenceAttention(), ReferenceAttention(), timed=True, variants=[variant])
    assert row.problem is None and row.deviation == 0
    assert row.least_bytes == 8 * 2048 * 2 * 256 * 4
    assert row.seconds and row.plain_seconds and row.bytes_per_second and row.speedup


MAC = {
    "architecture": "applegpu_g14d",
    "memory_size": 192 << 30,
    "max_recommended_working_set_size": 144 << 30,
    "device_name": "Apple M2 Ultra",
}


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("0", "macOS's own limit"),
        ("184320", "184320 (94% of the memory), set by hand"),
        ("", "no such setting"),
    ],
)
def test_the_doctor_explains_the_wired_limit(limit: str, words: str) -> None:
    from mlxbatch.capacity.chips import find_chip

    report = machine_report(
        device_info=lambda: MAC, sysctl=lambda name: limit, system="Darwin", chip=find_chip("m2-ultra")
    )
    assert words in report.facts["iogpu.wired_limit_mb"]
    assert report.facts["GPU"].startswith("76 cores, generation 14 (applegpu_g14d)")
    assert report.facts["GPU working set"].startswith("144 GiB")
    assert any("iogpu.wired_limit_mb=188416" in line for line in report.advice) == (limit in ("", "0"))


def test_doctor_prints_json_and_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["mlx"] and facts["machine"]["BLAS"] and facts["memory"] > 0
    rows = [
        KernelRow("decode, float16", 1e-4, 5e-3, None, 1e-4, 40_000_000, 3e-4),
        KernelRow("prefill, float16", 0.7, 5e-3, "differs from the reference"),
    ]
    report = machine_report(device_info=lambda: MAC, sysctl=lambda name: "0", system="Darwin")
    monkeypatch.setattr("mlxbatch.execution.machine_report.machine_report", lambda: report)
    monkeypatch.setattr(doctor, "_kernel_rows", lambda: rows)
    assert main(["doctor", "--kernels"]) == 1
    shown = capsys.readouterr().out
    assert "400" in shown and "3.0x" in shown and "FAILED" in shown
    assert "2 kernels: 1 right, 1 replaced by plain MLX" in shown
    assert main(["doctor", "--kernels", "--json"]) == 1
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert kernels[0]["bytes_per_second"] == pytest.approx(4e11) and kernels[1]["problem"]
