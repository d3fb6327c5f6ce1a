"""What an engine shows of itself, as one immutable value taken between two steps.

Every number is read from the engine's own state or counters; nothing is estimated for display. Times are
seconds on the engine's monotonic clock (`Snapshot.clock` is now), except `wall` and `EngineEvent.wall`, which
are Unix time. The process layer fills the fields that only it knows (labels, clients); see `decorate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

Phase = Literal["prefill", "decode", "recompute"]

# Owners in `PoolState.runs`; 0 and above is the slot of the one sequence that holds the block.
BLOCK_FREE = -1
BLOCK_CACHED = -2  # no owner, findable by its hash, evictable
BLOCK_SHARED = -3  # held by two or more sequences
BLOCK_EVICTED = -4  # lost its cached content within the last second
BLOCK_RESERVED = -5  # block 0, the zero block


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The loaded model. Sizes in bytes; `kv_bytes_per_token` sums the full-attention groups."""

    name: str
    source: str = ""  # repo id or path it was loaded from
    dtype: str = ""
    quantization: str = ""  # for example "4-bit g64"; empty: none
    parameters: int = 0
    layers: int = 0
    max_model_len: int = 0
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    kv_dtype: str = ""
    block_size: int = 16
    attention: str = "reference"  # the implementation in use: "reference" or "metal"


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The machine as the engine sees it. None where it is not known."""

    chip: str = ""
    backend: str = "cpu"  # MLX's device: "cpu" or "metal"
    memory_bytes: int = 0
    budget_bytes: int = 0  # what this engine may reserve: weights, activations, tails and pool
    bandwidth: float | None = None  # memory bytes per second


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bytes held now, by what holds them. `active`, `peak` and `buffer_cache` are MLX's own counters."""

    weights: int = 0
    pool: int = 0  # allocated blocks, used or not
    tails: int = 0  # tail arrays of all slots
    active: int = 0
    peak: int = 0
    buffer_cache: int = 0


class SlotState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One running sequence.

    `computed_tokens` counts positions whose KV exists; prefill progress is computed_tokens / target_tokens,
    where the target is the prompt (or, when recomputing after a preemption, prompt and output so far).
    """

    slot: int
    request_id: str
    output_index: int = 0
    label: str = ""
    client: str = ""
    priority: int = 0
    phase: Phase = "decode"
    prompt_tokens: int = 0
    computed_tokens: int = 0
    target_tokens: int = 0
    output_tokens: int = 0
    max_tokens: int | None = None  # the request's own limit, or what fits the context
    blocks: int = 0  # pool blocks held, all groups
    shared_blocks: int = 0  # of these, held by another sequence too
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    tail_tokens: int = 0  # live tokens in the tail, not yet in a block
    tokens_per_second: float | None = None  # decode rate over the last seconds; None before two tokens
    ttft: float | None = None  # seconds; None before the first token
    preemptions: int = 0


class WaitingRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request that holds no slot. `hit_tokens` would come from the prefix cache, were it admitted now."""

    request_id: str
    label: str = ""
    client: str = ""
    priority: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    waited: float = 0.0
    preempted: bool = False


class PoolState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The block pool of one KV group. in_use + cached + free + the reserved zero block == total_blocks.

    `runs` is the pool itself in id order, run-length coded as (owner, length); ids from `allocated_blocks`
    to `total_blocks` are in the budget but not allocated yet, hence free.
    """

    name: str = "full"
    window: int | None = None
    bytes_per_block: int = 0
    total_blocks: int = 0
    allocated_blocks: int = 0
    in_use: int = 0
    shared: int = 0  # of in_use
    cached: int = 0
    free: int = 0
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def own(self) -> int:
        return self.in_use - self.shared


class TailState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tails of all slots: `tokens` live of `slots` x `tail_len` places, beside the pool."""

    slots: int = 0
    tail_len: int = 0
    tokens: int = 0


class StepMark(msgspec.Struct, frozen=True, array_like=True):
    """One step on the tape. `ended` is on the engine's clock, `seconds` from launch to samples read."""

    step: int
    prefill_tokens: int
    decode_rows: int
    preemptions: int = 0
    seconds: float = 0.0
    ended: float = 0.0
    flush: bool = False
    off_target: bool = False


class Percentiles(msgspec.Struct, frozen=True, array_like=True):
    """Seconds. All 0 while `count` is 0."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    count: int = 0


class EngineEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something worth a line: admit, finish, preempt, evict, cancel, refuse, grow, shrink, restart, error."""

    number: int  # counts up by one, so that a reader knows which are new
    wall: float
    kind: str
    request_id: str = ""
    label: str = ""
    text: str = ""


class EffPoint(msgspec.Struct, frozen=True, array_like=True):
    """Decode throughput at `rows`; `efficiency` is per row, against one row; `of_roof` None: roof unknown."""

    rows: int
    tokens_per_second: float
    efficiency: float
    of_roof: float | None = None


class EffCurve(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The eff(B) curve that the cap on rows comes from, and where the engine stands on it now."""

    source: str = ""  # "tuned", "observed", "chip table"; empty: no curve
    saturation: float | None = None  # S of eff(B) = S (1 - exp(-B / S))
    cap: int = 0  # rows the engine lets run
    points: tuple[EffPoint, ...] = ()
    now: EffPoint | None = None  # mean decode rows and rate over the last seconds


class Rates(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens per second now (last seconds) and for each of the last 60 seconds, oldest first."""

    decode: float = 0.0
    prefill: float = 0.0
    decode_history: tuple[float, ...] = ()
    prefill_history: tuple[float, ...] = ()


class Counters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Totals since the engine started. The same counters that `stats()` and `--stats` report."""

    requests_submitted: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    flushes: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    evictions: int = 0
    off_target_steps: int = 0

    @property
    def prefix_hit_rate(self) -> float:
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0


class ClientInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A connected client, or one that left requests behind (`connected` False). A batch run tells how many of its
    `total` requests are `done`; 0 of 0 where a client tells nothing."""

    client_id: str
    kind: str = ""  # "chat", "run", "top", "python", ...
    pid: int = 0
    title: str = ""
    requests: int = 0
    done: int = 0
    total: int = 0
    connected: bool = True


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole engine at one moment. `number` counts up; a lower one is stale."""

    number: int = 0
    clock: float = 0.0
    wall: float = 0.0
    uptime: float = 0.0
    model: ModelFacts
    machine: MachineFacts = MachineFacts()
    memory: MemoryUse = MemoryUse()

    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    slots: tuple[SlotState, ...] = ()  # running sequences, by slot
    waiting: tuple[WaitingRequest, ...] = ()  # the first WAITING_SHOWN in the order they will be admitted
    waiting_count: int = 0
    head_reason: str = ""  # why the head of the queue waits, for example "no free slot"; empty: nothing waits

    pools: tuple[PoolState, ...] = ()
    tails: TailState = TailState()
    steps: tuple[StepMark, ...] = ()  # the last STEPS_SHOWN, oldest first
    rates: Rates = Rates()
    queue_time: Percentiles = Percentiles()
    ttft: Percentiles = Percentiles()
    tpot: Percentiles = Percentiles()
    preemptions_last_minute: int = 0
    counters: Counters = Counters()
    eff: EffCurve = EffCurve()
    events: tuple[EngineEvent, ...] = ()  # the last EVENTS_SHOWN, oldest first
    clients: tuple[ClientInfo, ...] = ()

    @property
    def decode_rows(self) -> int:
        return sum(slot.phase == "decode" for slot in self.slots)

    @property
    def prefill_rows(self) -> int:
        return len(self.slots) - self.decode_rows


STEPS_SHOWN = 240
WAITING_SHOWN = 32
EVENTS_SHOWN = 64


def decorate(
    snapshot: Snapshot, name_of: Callable[[str], tuple[str, str]], clients: tuple[ClientInfo, ...]
) -> Snapshot:
    """The snapshot with labels and clients filled in. `name_of(request_id)` gives (label, client)."""

    def named(row: SlotState | WaitingRequest) -> tuple[str, str]:
        label, client = name_of(row.request_id)
        return label or row.label, client or row.client

    replace = msgspec.structs.replace
    slots, waiting, events = [], [], []
    for slot in snapshot.slots:
        label, client = named(slot)
        slots.append(replace(slot, label=label, client=client))
    for request in snapshot.waiting:
        label, client = named(request)
        waiting.append(replace(request, label=label, client=client))
    for event in snapshot.events:
        label = name_of(event.request_id)[0] if event.request_id else ""
        events.append(replace(event, label=label or event.label))
    return replace(snapshot, slots=tuple(slots), waiting=tuple(waiting), events=tuple(events), clients=clients)
