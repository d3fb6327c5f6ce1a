"""An engine without a model: it plays given answers step by step on a clock of its own.

Slots, blocks, prefix sharing, eviction and preemption follow the real rules in their plainest form, so that
every snapshot is consistent in itself. Nothing happens until a test calls `step` or `play`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from scripted_snapshot import BLOCK, START, snapshot_of

from mlxbatch.engine.snapshot import ClientInfo, EngineEvent, Snapshot, StepMark
from mlxbatch.errors import RequestError
from mlxbatch.models.tags import detect_tags
from mlxbatch.process.answer_format import AnswerFormat
from mlxbatch.process.messages import Submit
from mlxbatch.request import OutputDelta, RequestTiming
from mlxbatch.tui.engine_link import LinkEvent, LinkStatus


@dataclass(eq=False)
class Sequence_:
    """One request. `words` are its answer, a token each."""

    key: str
    request_id: str
    label: str
    client: str
    prompt_tokens: int
    words: Sequence[str]
    max_tokens: int
    arrival: float
    priority: int = 1
    prefix: str = ""
    prefix_tokens: int = 0
    slot: int = -1
    computed: int = 0
    target: int = 0
    cached: int = 0
    output: int = 0
    blocks: list[int] = field(default_factory=list)
    first_token: float | None = None
    last_times: deque[float] = field(default_factory=lambda: deque(maxlen=12))
    preemptions: int = 0

    @property
    def phase(self) -> str:
        if self.computed >= self.target:
            return "decode"
        return "recompute" if self.output else "prefill"


class ScriptedEngine:
    """`script` maps a prompt (or a prefix of one) to its words; others get `default`."""

    def __init__(
        self,
        *,
        model: str = "Qwen3-4B-4bit",
        blocks: int = 1153,
        slots: int = 8,
        budget: int = 256,
        context: int = 32_768,
        script: dict[str, Sequence[str]] | None = None,
    ) -> None:
        self.model, self.max_model_len, self.restarts = model, context, 0
        self.answers = AnswerFormat(tags=detect_tags("<think>"))
        self.max_slots, self.budget, self.total_blocks = slots, budget, blocks
        self.script = script or {}
        self.default: Sequence[str] = tuple(f"word{n} " for n in range(400))
        self.clock = 0.0
        self.running: list[Sequence_] = []
        self.queue: list[Sequence_] = []
        self.owners: list[set[str]] = [set() for _ in range(blocks)]
        self.cached: dict[int, str] = {}  # evictable block -> what it holds, oldest first
        self.evicted_at: dict[int, float] = {}
        self.prefixes: dict[str, list[int]] = {}
        self.marks: list[StepMark] = []
        self.events_log: list[EngineEvent] = []
        self.clients = [ClientInfo(client_id="me", kind="chat", pid=4242, title="chat")]
        self.totals: dict[str, int] = {}
        self.samples: dict[str, list[float]] = {"queue": [], "ttft": [], "tpot": []}
        self.per_second: dict[int, list[int]] = {}
        self.number = 0
        self.submitted: list[Submit] = []
        self.refusal: RequestError | None = None
        self._outbox: asyncio.Queue[LinkEvent | None] = asyncio.Queue()

    # EngineLink

    def request_key(self, request_id: str) -> str:
        return f"me/{request_id}"

    async def start(self) -> None:
        self.tell(LinkStatus("ready"))

    async def submit(self, submit: Submit) -> int:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(submit)
        messages = submit.messages or []
        tokens = await self.count_chat(messages)
        prompt = str(messages[-1]["content"]) if messages else ""
        words = next((words for start, words in self.script.items() if prompt.startswith(start)), self.default)
        limit = submit.params.get("max_tokens") or self.max_model_len - tokens
        system = str(messages[0]["content"]) if messages and messages[0]["role"] == "system" else ""
        self.add(
            submit.request_id,
            prompt_tokens=tokens,
            words=words,
            max_tokens=limit,
            label=submit.label,
            client="me",
            priority=0,
            prefix=system,
            prefix_tokens=len(system.split()) + 4 if system else 0,
        )
        return tokens

    async def cancel(self, request_key: str) -> None:
        for sequence in [*self.running, *self.queue]:
            if sequence.key == request_key:
                self._finish(sequence, "abort")

    async def count_chat(self, messages: list[dict[str, object]], /) -> int:
        return sum(4 + len(str(message["content"]).split()) for message in messages)

    async def stats(self) -> dict[str, object]:
        return {"steps": len(self.marks), **self.totals}

    async def events(self) -> AsyncIterator[LinkEvent]:
        while (event := await self._outbox.get()) is not None:
            yield event

    async def close(self) -> None:
        self._outbox.put_nowait(None)

    # The script

    def tell(self, event: LinkEvent) -> None:
        self._outbox.put_nowait(event)

    def add(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        words: Sequence[str] | None = None,
        max_tokens: int = 512,
        label: str = "",
        client: str = "run1",
        priority: int = 1,
        prefix: str = "",
        prefix_tokens: int = 0,
    ) -> None:
        """Queue a request; one of another client is shown but streams to nobody."""
        self.queue.append(
            Sequence_(
                f"{client}/{request_id}",
                request_id,
                label,
                client,
                prompt_tokens,
                self.default if words is None else words,
                max_tokens,
                self.clock,
                priority,
                prefix,
                prefix_tokens,
            )
        )
        self.queue.sort(key=lambda sequence: sequence.priority)
        self._count("requests_submitted")

    def play(self, steps: int) -> None:
        """Steps, and a snapshot at the end."""
        for _ in range(steps):
            self.step()
        self.show()

    def show(self) -> None:
        self.tell(self.snapshot())

    def step(self) -> None:
        """Admit, decode a token for every row, prefill with the rest of the budget."""
        self._admit()
        decoding = [sequence for sequence in self.running if sequence.phase == "decode"]
        room = self.budget - len(decoding)
        preempted = self.totals.get("preemptions", 0)
        for sequence in decoding:
            self._grow(sequence, sequence.computed + 1)
        decoding = [sequence for sequence in decoding if sequence in self.running]
        prefilled, sampled = 0, list(decoding)
        for sequence in [s for s in self.running if s.phase != "decode"]:
            chunk = min(room, sequence.target - sequence.computed)
            if chunk <= 0 or not self._grow(sequence, sequence.computed + chunk):
                continue
            sequence.computed += chunk
            room -= chunk
            prefilled += chunk
            if sequence.computed >= sequence.target:
                sampled.append(sequence)
        sampled = [sequence for sequence in sampled if sequence in self.running]
        duration = 0.018 + 0.0015 * len(decoding) + 0.0004 * prefilled
        self.clock += duration if sampled or prefilled else 0.1
        for sequence in decoding:
            sequence.computed += 1 if sequence in sampled else 0
        for sequence in sampled:
            self._sample(sequence)
        if sampled or prefilled:
            preempted = self.totals.get("preemptions", 0) - preempted
            self.marks.append(StepMark(len(self.marks), prefilled, len(decoding), preempted, duration, self.clock))
            tally = self.per_second.setdefault(int(self.clock), [0, 0])
            tally[0] += len(sampled)
            tally[1] += prefilled
            self._count("prompt_tokens", prefilled)

    def _admit(self) -> None:
        while self.queue and len(self.running) < self.max_slots and not self.lacking(self.queue[0]):
            sequence = self.queue.pop(0)
            taken = {running.slot for running in self.running}
            sequence.slot = next(slot for slot in range(self.max_slots) if slot not in taken)
            self.running.append(sequence)
            sequence.target = sequence.prompt_tokens + max(0, sequence.output - 1)
            shared = self.prefix_blocks(sequence)
            for block in shared:
                self.owners[block].add(sequence.key)
                self.cached.pop(block, None)
            sequence.blocks = list(shared)
            sequence.computed = sequence.cached = len(shared) * BLOCK
            self._count("prefix_query_tokens", sequence.target)
            self._count("prefix_hit_tokens", sequence.cached)
            self.samples["queue"].append(self.clock - sequence.arrival)

    def prefix_blocks(self, sequence: Sequence_) -> list[int]:
        blocks = self.prefixes.get(sequence.prefix, []) if sequence.prefix else []
        return blocks[: min(sequence.prefix_tokens, sequence.prompt_tokens - 1) // BLOCK]

    def lacking(self, sequence: Sequence_) -> int:
        """Blocks that are missing for its prompt."""
        shared = self.prefix_blocks(sequence)
        need = sequence.prompt_tokens // BLOCK - len(shared) + len(self.running)  # a block for each to grow
        evictable = sum(1 for block in self.cached if block not in shared)
        return max(0, need - self.free() - evictable)

    def free(self) -> int:
        return sum(not owners for owners in self.owners[1:]) - len(self.cached)

    def _grow(self, sequence: Sequence_, tokens: int) -> bool:
        while len(sequence.blocks) < tokens // BLOCK:
            block = self._take()
            while block is None and sequence in self.running:
                self._preempt()
                block = self._take()
            if block is None or sequence not in self.running:
                return False
            self.owners[block].add(sequence.key)
            sequence.blocks.append(block)
            if sequence.prefix and len(sequence.blocks) * BLOCK <= sequence.prefix_tokens:
                known = self.prefixes.setdefault(sequence.prefix, [])
                if len(known) < len(sequence.blocks):
                    known.append(block)
        return True

    def _take(self) -> int | None:
        for block in range(1, self.total_blocks):
            if not self.owners[block] and block not in self.cached:
                return block
        if not self.cached:
            return None
        block = next(iter(self.cached))
        del self.cached[block]
        self.evicted_at[block] = self.clock
        self._count("evictions")
        self.prefixes = {name: known for name, known in self.prefixes.items() if block not in known}
        return block

    def _preempt(self) -> None:
        victim = max(self.running, key=lambda sequence: (sequence.priority, sequence.arrival, sequence.slot))
        held, victim.preemptions = victim.computed, victim.preemptions + 1
        self._release(victim)
        self.running.remove(victim)
        self.queue.insert(0, victim)
        self._count("preemptions")
        self._log("preempt", victim, f"out of blocks: 0 free, 0 evictable → recompute {held} tok")

    def _release(self, sequence: Sequence_) -> None:
        for block in reversed(sequence.blocks):
            self.owners[block].discard(sequence.key)
            if not self.owners[block]:
                self.cached[block] = sequence.key
        sequence.blocks, sequence.computed, sequence.slot = [], 0, -1

    def _sample(self, sequence: Sequence_) -> None:
        word = sequence.words[sequence.output] if sequence.output < len(sequence.words) else ""
        sequence.output += 1
        self._count("output_tokens")
        if sequence.first_token is None:
            sequence.first_token = self.clock
            self.samples["ttft"].append(self.clock - sequence.arrival)
        elif sequence.last_times:
            self.samples["tpot"].append(self.clock - sequence.last_times[-1])
        sequence.last_times.append(self.clock)
        reason = None
        if sequence.output >= len(sequence.words):
            reason = "stop"
        elif sequence.output >= sequence.max_tokens:
            reason = "length"
        self._deliver(sequence, word, (sequence.output,), reason)
        if reason is not None:
            self._end(sequence, reason)

    def _finish(self, sequence: Sequence_, reason: str) -> None:
        self._deliver(sequence, "", (), reason)
        self._end(sequence, reason)

    def _deliver(self, sequence: Sequence_, text: str, ids: tuple[int, ...], reason: str | None) -> None:
        if sequence.client == "me":
            self.tell(
                OutputDelta(
                    sequence.request_id, 0, ids, text, finish_reason=reason, num_cached_tokens=sequence.cached
                )
            )

    def _end(self, sequence: Sequence_, reason: str) -> None:
        slot = sequence.slot
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.queue.remove(sequence)
        self._count("requests_aborted" if reason == "abort" else "requests_finished")
        spent = self.clock - sequence.arrival
        self._log("finish", sequence, f"{reason} · {sequence.output} tok · {spent:.1f} s")
        if sequence.client == "me":
            self.tell(
                RequestTiming(
                    sequence.request_id,
                    sequence.arrival,
                    sequence.arrival,
                    sequence.first_token or self.clock,
                    self.clock,
                    sequence.prompt_tokens,
                    sequence.output,
                    sequence.cached,
                    sequence.preemptions,
                )
            )
        sequence.slot = slot

    def _count(self, name: str, amount: int = 1) -> None:
        self.totals[name] = self.totals.get(name, 0) + amount

    def _log(self, kind: str, sequence: Sequence_, text: str) -> None:
        self.events_log.append(
            EngineEvent(
                number=len(self.events_log),
                wall=START + self.clock,
                kind=kind,
                request_id=sequence.key,
                label=sequence.label,
                text=text,
            )
        )

    def snapshot(self) -> Snapshot:
        self.number += 1
        return snapshot_of(self)
