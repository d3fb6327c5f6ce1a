"""Every check of the bench fires, with the file and line of the bug, and does not fire on the corrected kernel."""

from __future__ import annotations

import mlx.core as mx
import pytest
from bench import Bench, BenchError, KernelFault, Kind, Location, Report
from planted import CRASHES, HEADER, PLANTED, PREFIX, Planted

THREADS = 256


def launch(bench: Bench, source: str) -> mx.array:
    kernel = bench.metal_kernel("planted", ["x"], ["out"], PREFIX + source, HEADER)
    (out,) = kernel(
        inputs=[mx.zeros(THREADS)], grid=(THREADS, 1, 1), threadgroup=(128, 1, 1), output_shapes=[(THREADS,)],
        output_dtypes=[mx.float32],
    )  # fmt: skip
    return out


def faulty(bench: Bench, source: str) -> Report:
    with pytest.raises(KernelFault) as caught:
        launch(bench, source)
    return caught.value.report


def places(report: Report, kind: Kind) -> set[Location]:
    """Of the findings of one kind, the calls to them included."""
    return {
        place for f in report.findings if f.kind is kind for place in (f.location, *f.callers) if place is not None
    }


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_check_fires_at_its_line(bench: Bench, planted: Planted) -> None:
    report = faulty(bench, planted.source)
    assert Location("planted.metal", planted.line) in places(report, planted.kind), report.findings


CORRECTED = {name: planted for name, planted in PLANTED.items() if planted.corrected}


@pytest.mark.parametrize("planted", CORRECTED.values(), ids=CORRECTED)
def test_corrected_kernel_has_no_findings(bench: Bench, planted: Planted) -> None:
    launch(bench, planted.corrected)
    assert bench.report.findings == ()


def test_call_chain_of_a_finding(bench: Bench) -> None:
    (finding,) = faulty(bench, "\n  out[i] = load(x, i + 1);").findings
    assert str(finding.location) == "planted.metal:1"
    assert [str(place) for place in finding.callers] == ["planted.metal:14"]
    assert "read of 4 bytes, at byte 1024 of x (1024 bytes), by thread 127 of threadgroup 1" in finding.message


def test_race_names_both_threads_and_the_variable(bench: Bench) -> None:
    planted = PLANTED["missing barrier"]
    report = faulty(bench, planted.source)
    (finding,) = [f for f in report.findings if f.location == Location("planted.metal", planted.line)]
    assert finding.message == (
        "write of 4 bytes, at byte 256 of threadgroup variable s, by thread 64 of threadgroup 0, "
        "conflicts with thread 63 of threadgroup 0 at planted.metal:17"
    )


def test_output_that_is_not_written(bench: Bench) -> None:
    source = "  if (t != 5) out[i] = x[i];"
    (finding,) = faulty(bench, source).findings
    assert finding.kind is Kind.UNWRITTEN_OUTPUT
    assert finding.message == "8 of the 1024 bytes of out, the first at byte 20"
    bench.configure(partial_outputs=frozenset({"out"}))
    launch(bench, source)


def test_missing_return(bench: Bench) -> None:
    assert Location("planted.metal", 3) in places(faulty(bench, "  out[i] = sign_of(x[i]);"), Kind.MISSING_RETURN)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("planted", CRASHES.values(), ids=CRASHES)
def test_crash_is_a_finding_and_the_bench_goes_on(bench: Bench, planted: Planted, checked: bool) -> None:
    bench.configure(checked=checked, timeout=1)
    report = faulty(bench, planted.source)
    assert report.aborted
    assert report.kinds() == {planted.kind}
    if planted.kind is not Kind.STACK_OVERFLOW:  # which strikes where the function begins
        assert Location("planted.metal", planted.line) in places(report, planted.kind)
    assert launch(bench, "  out[i] = 3;").sum().item() == 3 * THREADS


def test_divergence_is_found_unchecked_too(bench: Bench) -> None:
    bench.configure(checked=False)
    planted = PLANTED["threads return before a barrier"]
    report = faulty(bench, planted.source)
    assert report.kinds() == {Kind.DIVERGENT_BARRIER}
    assert Location("planted.metal", planted.line) in places(report, planted.kind)


def test_findings_can_be_read_instead_of_raised(bench: Bench) -> None:
    bench.configure(raise_on_findings=False)
    launch(bench, PLANTED["missing barrier"].source)
    assert bench.report.kinds() == {Kind.THREADGROUP_RACE}


def test_too_large_threadgroup(bench: Bench) -> None:
    kernel = bench.metal_kernel("wide", ["x"], ["out"], "out[0] = x[0];")
    with pytest.raises(BenchError, match="1056 threads"):
        kernel(
            inputs=[mx.zeros(8)], grid=(1056, 1, 1), threadgroup=(1056, 1, 1), output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )  # fmt: skip
