"""One word for what limits the engine now, with the reason. Pure: a Snapshot in, a Verdict out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlxbatch.engine.snapshot import Snapshot

Name = Literal["IDLE", "PREFILL-BOUND", "DECODE-BOUND", "SLOT-BOUND", "KV-BOUND", "THRASHING", "STALLED", "NO ENGINE"]

STALL_SECONDS = 5.0  # no step for this long although a sequence runs ...
STALL_STEPS = 20.0  # ... and for this many usual steps, so that a slow model is not called stalled
RECENT_SECONDS = 10.0
THRASHING_STEPS = 60  # of the newest steps ...
THRASHING_LEAST = 3  # ... so many preemptions: each computes a whole sequence again
SILENT_SECONDS = 4.0  # no snapshot from the engine for this long (it sends four a second)

EXPLANATIONS: dict[str, str] = {
    "IDLE": "No request runs or waits.",
    "DECODE-BOUND": "All that came is generating and nothing waits. More rows would add throughput.",
    "PREFILL-BOUND": "Most of the time goes into reading prompts. Shared prefixes help.",
    "SLOT-BOUND": "Requests wait because every row is taken. --max-num-seqs raises the cap.",
    "KV-BOUND": "Rows are free but KV blocks are not. --kv-memory or shorter contexts help.",
    "THRASHING": "Sequences keep losing their blocks and are computed again. Fewer rows or more KV memory.",
    "STALLED": "Sequences run but no step ends: see mlxbatch engine logs.",
    "NO ENGINE": "The engine does not answer.",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reason` is why the head of the queue waits or why the name was chosen; may be empty."""

    name: Name
    reason: str = ""

    @property
    def severity(self) -> Literal["good", "warn", "bad", "dim"]:
        if self.name in ("STALLED", "THRASHING", "NO ENGINE"):
            return "bad"
        if self.name in ("KV-BOUND", "SLOT-BOUND"):
            return "warn"
        return "dim" if self.name == "IDLE" else "good"


def judge(snapshot: Snapshot, age: float = 0.0) -> Verdict:
    """The verdict on a snapshot that arrived `age` seconds ago. Worse states hide milder ones."""
    if age > SILENT_SECONDS:
        return Verdict("STALLED", f"no word from the engine for {age:.0f} s")
    waiting = snapshot.waiting_count
    if not snapshot.slots and not waiting:
        return Verdict("IDLE")

    silence = _seconds_without_step(snapshot)
    if silence is not None:
        return Verdict("STALLED", f"no step for {silence:.0f} s")

    newest = snapshot.steps[-THRASHING_STEPS:]
    preemptions = sum(step.preemptions for step in newest)
    if preemptions >= THRASHING_LEAST:
        return Verdict("THRASHING", f"{preemptions} preemptions in {len(newest)} steps")

    if waiting and snapshot.head_reason:  # without a reason the head is admitted in the next step
        rows = row_cap(snapshot)
        if rows and len(snapshot.slots) >= rows:
            return Verdict("SLOT-BOUND", snapshot.head_reason)
        return Verdict("KV-BOUND", snapshot.head_reason)

    recent = [step for step in snapshot.steps if step.ended >= snapshot.clock - RECENT_SECONDS]
    busy = sum(step.seconds for step in recent)
    prefilling = sum(step.seconds for step in recent if step.prefill_tokens)
    if busy > 0:
        share = prefilling / busy
        if share > 0.5:
            return Verdict("PREFILL-BOUND", f"{share * 100:.0f} % of the time in steps with prefill")
        return Verdict("DECODE-BOUND")
    return Verdict("PREFILL-BOUND" if snapshot.prefill_rows > snapshot.decode_rows else "DECODE-BOUND")


def row_cap(snapshot: Snapshot) -> int:
    """How many rows the engine lets run: the cap from the curve, within max_num_seqs."""
    cap = snapshot.eff.cap
    return min(cap, snapshot.max_num_seqs) if cap and snapshot.max_num_seqs else cap or snapshot.max_num_seqs


def _seconds_without_step(snapshot: Snapshot) -> float | None:
    """How long no step has ended, if that is too long. Before the first step, since the engine started."""
    if not snapshot.slots:
        return None
    if not snapshot.steps:
        return snapshot.uptime if snapshot.uptime > STALL_SECONDS * 6 else None
    silence = snapshot.clock - snapshot.steps[-1].ended
    durations = sorted(step.seconds for step in snapshot.steps)
    usual = durations[len(durations) // 2]
    return silence if silence > max(STALL_SECONDS, STALL_STEPS * usual) else None
