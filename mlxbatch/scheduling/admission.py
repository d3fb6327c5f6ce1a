"""Whether a waiting sequence may start now: blocks that it needs, and prefixes that are on their way."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from mlxbatch.scheduling.groups import KVMemory
from mlxbatch.scheduling.sequence import Sequence

PrefixHit = list[list[int | None]]  # blocks of each group


class Admission:
    """Answers about one waiting sequence at a time; remembers why the first of a plan had to wait."""

    def __init__(self, kv: KVMemory) -> None:
        self._kv = kv
        self.wait_reason = ""
        self.lacking: list[int] | None = None  # blocks of each group that somebody could not get

    def begin(self) -> None:
        self.wait_reason = ""

    def waits(self, reason: str) -> None:
        self.wait_reason = self.wait_reason or reason

    def prefix_is_being_computed(self, seq: Sequence, hit: PrefixHit, running: Seq[Sequence]) -> bool:
        """Whether a running prompt is about to write the very block that this one lacks first.

        Waiting for it computes a shared prefix once. It cannot last: the running prompt moves on at every step,
        or is preempted, and then no longer counts.
        """
        number = len(hit[0]) if hit else 0
        if number >= len(seq.prompt_hashes):
            return False
        wanted = seq.prompt_hashes[number]
        for other in running:
            hashes = other.prompt_hashes
            if number < len(hashes) and hashes[number] == wanted and not other.is_decoding:
                return True
        return False

    def has_room(self, seq: Sequence, hit: PrefixHit, running: Seq[Sequence]) -> bool:
        """Whether the prompt's blocks fit beside what running prompts still need, with a little to spare: a block
        for each running row, so that the next blocks of decodes do not preempt the newcomer at once."""
        kv = self._kv
        needs = kv.blocks_for(len(seq.token_ids))
        held = [sum(1 for block_id in ids if block_id is not None) for ids in hit]
        revived = kv.hits_to_revive(hit)
        spare = max(len(running), min((pool.num_blocks for pool in kv.pools), default=0) // 100) if running else 0
        totals = []
        for group in range(len(kv.pools)):
            outstanding = sum(self._outstanding(other, group) for other in running)
            totals.append(max(0, needs[group] - held[group]) + revived[group] + outstanding + spare)
        if kv.can_allocate(totals):
            return True
        self.lacking = totals
        group = max(range(len(totals)), key=lambda g: totals[g] - kv.available(g))
        self.waits(f"{totals[group]} KV blocks needed, {kv.available(group)} free or evictable")
        return False

    def _outstanding(self, seq: Sequence, group: int) -> int:
        """Blocks that a running prompt has yet to allocate."""
        if seq.kv is None or seq.is_decoding:
            return 0
        need = self._kv.blocks_for(len(seq.token_ids))[group]
        return max(0, need - seq.kv.tables[group].num_held)
