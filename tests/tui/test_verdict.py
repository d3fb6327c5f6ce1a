"""The verdict is decided from a snapshot alone."""

from __future__ import annotations

import msgspec

from mlxbatch.engine.snapshot import EffCurve, ModelFacts, SlotState, Snapshot, StepMark, WaitingRequest
from mlxbatch.tui.verdict import EXPLANATIONS, SILENT_SECONDS, judge, row_cap


def steps(*marks: tuple[int, int, int], seconds: float = 0.05, until: float = 100.0) -> tuple[StepMark, ...]:
    """(prefill tokens, decode rows, preemptions) of each step, the last one ended at `until`."""
    return tuple(
        StepMark(number, prefill, rows, preempted, seconds, until - seconds * (len(marks) - 1 - number))
        for number, (prefill, rows, preempted) in enumerate(marks)
    )


def snapshot(running: int = 2, waiting: int = 0, **changes: object) -> Snapshot:
    base = Snapshot(
        model=ModelFacts(name="m"),
        clock=100.1,
        uptime=100.0,
        max_num_seqs=4,
        slots=tuple(SlotState(slot=n, request_id=f"r{n}") for n in range(running)),
        waiting=tuple(WaitingRequest(request_id=f"w{n}") for n in range(waiting)),
        waiting_count=waiting,
        steps=steps(*[(0, 2, 0)] * 50),
    )
    return msgspec.structs.replace(base, **changes)


def test_idle() -> None:
    verdict = judge(snapshot(running=0))
    assert (verdict.name, verdict.reason, verdict.severity) == ("IDLE", "", "dim")


def test_decode_bound_and_prefill_bound_go_by_time() -> None:
    assert judge(snapshot()).name == "DECODE-BOUND"
    mostly_prefill = steps(*[(256, 2, 0)] * 30, *[(0, 2, 0)] * 20)
    verdict = judge(snapshot(steps=mostly_prefill))
    assert (verdict.name, verdict.reason) == ("PREFILL-BOUND", "60 % of the time in steps with prefill")
    long_ago = steps(*[(256, 2, 0)] * 30, until=80.0) + steps(*[(0, 2, 0)] * 10)
    assert judge(snapshot(steps=long_ago)).name == "DECODE-BOUND"


def test_slot_bound_and_kv_bound_tell_what_the_head_waits_for() -> None:
    full = judge(snapshot(running=4, waiting=3, head_reason="no free slot"))
    assert (full.name, full.reason, full.severity) == ("SLOT-BOUND", "no free slot", "warn")
    lacking = judge(snapshot(running=3, waiting=3, head_reason="4 blocks missing"))
    assert (lacking.name, lacking.reason) == ("KV-BOUND", "4 blocks missing")


def test_a_head_that_is_about_to_be_admitted_binds_nothing() -> None:
    assert judge(snapshot(running=3, waiting=1)).name == "DECODE-BOUND"


def test_the_cap_of_the_curve_counts_as_the_number_of_rows() -> None:
    capped = snapshot(running=3, waiting=1, head_reason="no free slot", eff=EffCurve(cap=3))
    assert row_cap(capped) == 3
    assert judge(capped).name == "SLOT-BOUND"
    assert row_cap(snapshot()) == 4
    assert row_cap(snapshot(eff=EffCurve(cap=9))) == 4


def test_thrashing_needs_several_preemptions_close_together() -> None:
    once = steps(*[(0, 2, 0)] * 40, (0, 2, 1), *[(0, 2, 0)] * 9)
    assert judge(snapshot(steps=once)).name == "DECODE-BOUND"
    often = steps(*[(0, 2, 0)] * 40, *[(0, 2, 1)] * 3)
    verdict = judge(snapshot(steps=often, waiting=1, head_reason="4 blocks missing"))
    assert (verdict.name, verdict.reason, verdict.severity) == ("THRASHING", "3 preemptions in 43 steps", "bad")
    past = steps(*[(0, 2, 1)] * 3, *[(0, 2, 0)] * 60)
    assert judge(snapshot(steps=past)).name == "DECODE-BOUND"


def test_stalled_when_no_step_ends_but_not_for_a_slow_model() -> None:
    verdict = judge(snapshot(clock=107.0))
    assert (verdict.name, verdict.reason) == ("STALLED", "no step for 7 s")
    slow = steps(*[(0, 2, 0)] * 10, seconds=2.0)
    assert judge(snapshot(clock=115.0, steps=slow)).name != "STALLED"
    assert judge(snapshot(clock=145.0, steps=slow)).name == "STALLED"
    assert judge(snapshot(running=0, clock=500.0)).name == "IDLE"  # nothing to do is no stall


def test_an_engine_that_says_nothing_is_stalled_whatever_it_said_last() -> None:
    verdict = judge(snapshot(running=0), age=SILENT_SECONDS + 5)
    assert (verdict.name, verdict.reason) == ("STALLED", "no word from the engine for 9 s")


def test_a_first_step_may_take_its_time() -> None:
    assert judge(snapshot(steps=(), uptime=20.0)).name == "DECODE-BOUND"
    assert judge(snapshot(steps=(), uptime=60.0)).name == "STALLED"


def test_every_verdict_is_explained() -> None:
    names = {"IDLE", "PREFILL-BOUND", "DECODE-BOUND", "SLOT-BOUND", "KV-BOUND", "THRASHING", "STALLED"}
    assert names <= set(EXPLANATIONS)
