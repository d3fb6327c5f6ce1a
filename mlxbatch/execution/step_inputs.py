"""From a step's plan to what a forward pass reads: host arrays built with numpy, sent to the device once.

Everything that depends on rows and tables alone stays on the device until they change, so that a steady
decode step sends its positions and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import mlx.core as mx
import numpy as np

from mlxbatch.errors import EngineError
from mlxbatch.execution.attention.layout import ChunkLayout, DecodeLayout
from mlxbatch.execution.cache import ChunkSpan, ForwardInputs
from mlxbatch.execution.kv_layer import PendingWrite, TailPlaces, TailWrite
from mlxbatch.scheduling.plan import NOT_ON_HOST, ZERO_BLOCK, BlockTable, ChunkRow, DecodeRow, KVView

_PADDING_VIEW_TABLE = BlockTable(0, np.zeros(0, np.int32))


@dataclass(slots=True, eq=False)
class _StableRows:
    """Device copies of what the decode rows' slots and views say, for every KV group."""

    slots: tuple[int, ...]
    views: tuple[KVView, ...]
    host_slots: np.ndarray
    host_flushed: tuple[int, ...]
    host_first: tuple[tuple[int, ...], ...]
    device_slots: mx.array
    device_flushed: mx.array
    device_tables: tuple[tuple[mx.array, mx.array], ...]  # table and first block, for each group
    stable: tuple[dict[object, object], ...] = field(default=())

    def holds(self, rows: Sequence[DecodeRow]) -> bool:
        return len(rows) == len(self.views) and all(
            row.view is view and row.slot == slot
            for row, view, slot in zip(rows, self.views, self.slots, strict=True)
        )


class StepInputs:
    """Builds `ForwardInputs`. Padding rows, if any, live in the scratch slot and see only themselves."""

    def __init__(self, num_groups: int, block_size: int, tail_len: int) -> None:
        self._num_groups = num_groups
        self._block_size = block_size
        self._tail_len = tail_len
        self._padding_view = KVView(0, (_PADDING_VIEW_TABLE,) * num_groups)
        self._rows: _StableRows | None = None
        self._no_slots = mx.zeros((0,), mx.int32)

    def flat(
        self,
        decode: Sequence[DecodeRow],
        chunks: Sequence[ChunkRow],
        previous_ids: mx.array | None,
        *,
        padding_rows: int = 0,
        scratch_slot: int = 0,
    ) -> ForwardInputs:
        """All tokens of a step as [T, 1]: decode rows, padding rows, then the chunks.

        `previous_ids` are the sampled ids of the step before, for rows whose token is not on the host.
        """
        if padding_rows:
            padding = DecodeRow(-1, scratch_slot, 0, 0, -1, self._padding_view)
            decode = (*decode, *([padding] * padding_rows))
        num_decode = len(decode)
        lengths = [num_decode] + [len(chunk.token_ids) for chunk in chunks]
        bounds = np.cumsum(lengths)
        positions = np.empty(int(bounds[-1]), np.int32)
        positions[:num_decode] = [row.position for row in decode]
        for chunk, begin, end in zip(chunks, bounds[:-1], bounds[1:], strict=True):
            positions[begin:end] = np.arange(chunk.start, chunk.start + end - begin, dtype=np.int32)
        spans = [
            ChunkSpan(int(begin), int(end), self._chunk_layouts(chunk))
            for chunk, begin, end in zip(chunks, bounds[:-1], bounds[1:], strict=True)
        ]
        rows = self._stable_rows(decode) if decode else None
        return ForwardInputs(
            token_ids=self._token_ids(decode, chunks, previous_ids)[:, None],
            offset=mx.array(positions),
            flat=True,
            num_decode=num_decode,
            slots=rows.device_slots if rows else self._no_slots,
            decode=self._decode_layouts(rows, positions[:num_decode]) if rows else (),
            chunks=tuple(spans),
            write=self._tail_write(rows, chunks, positions, bounds),
            pending=self._pending(chunks, bounds),
        )

    def segment(self, chunk: ChunkRow) -> ForwardInputs:
        """One chunk as [1, n]."""
        length = len(chunk.token_ids)
        bounds = np.array([0, length])
        positions = np.arange(chunk.start, chunk.start + length, dtype=np.int32)
        return ForwardInputs(
            token_ids=mx.array(np.array(chunk.token_ids, np.int32))[None],
            offset=mx.array(np.array([chunk.start], np.int32)),
            flat=False,
            num_decode=0,
            slots=mx.array(np.array([chunk.slot], np.int32)),
            decode=(),
            chunks=(ChunkSpan(0, length, self._chunk_layouts(chunk)),),
            write=self._tail_write(None, (chunk,), positions, bounds),
            pending=self._pending((chunk,), bounds),
        )

    def _stable_rows(self, decode: Sequence[DecodeRow]) -> _StableRows:
        if self._rows is not None and self._rows.holds(decode):
            return self._rows
        views = tuple(row.view for row in decode)
        slots = np.array([row.slot for row in decode], np.int32)
        flushed = tuple(view.flushed for view in views)
        tables, firsts = [], []
        for group in range(self._num_groups):
            own = [self._checked_table(view, group) for view in views]
            width = max(1, *(len(table.ids) for table in own)) if own else 1
            padded = np.full((len(own), width), ZERO_BLOCK, np.int32)
            for row, table in enumerate(own):
                padded[row, : len(table.ids)] = table.ids
            first = tuple(table.first for table in own)
            firsts.append(first)
            tables.append((mx.array(padded), mx.array(np.array(first, np.int32))))
        self._rows = _StableRows(
            slots=tuple(row.slot for row in decode),
            views=views,
            host_slots=slots,
            host_flushed=flushed,
            host_first=tuple(firsts),
            device_slots=mx.array(slots),
            device_flushed=mx.array(np.array(flushed, np.int32)),
            device_tables=tuple(tables),
            stable=tuple({} for _ in range(self._num_groups)),
        )
        return self._rows

    def _checked_table(self, view: KVView, group: int) -> BlockTable:
        table = view.tables[group]
        if (table.first + len(table.ids)) * self._block_size != view.flushed:
            raise EngineError(
                f"a block table covers blocks {table.first} to {table.first + len(table.ids)} of "
                f"{self._block_size} tokens, but {view.flushed} tokens are flushed"
            )
        return table

    def _decode_layouts(self, rows: _StableRows, positions: np.ndarray) -> tuple[DecodeLayout, ...]:
        lengths = positions + 1
        device_lengths = mx.array(lengths)
        host_lengths = tuple(lengths.tolist())
        return tuple(
            DecodeLayout(
                slots=rows.device_slots,
                tables=tables,
                first_block=first,
                flushed=rows.device_flushed,
                lengths=device_lengths,
                host_slots=rows.slots,
                host_flushed=rows.host_flushed,
                host_first=host_first,
                host_lengths=host_lengths,
                stable=stable,
            )
            for (tables, first), host_first, stable in zip(
                rows.device_tables, rows.host_first, rows.stable, strict=True
            )
        )

    def _chunk_layouts(self, chunk: ChunkRow) -> tuple[ChunkLayout, ...]:
        layouts = []
        for group in range(self._num_groups):
            table = self._checked_table(chunk.view, group)
            layouts.append(
                ChunkLayout(
                    slot=chunk.slot,
                    table=mx.array(np.array(table.ids, np.int32)),
                    first_block=table.first,
                    flushed=chunk.view.flushed,
                    start=chunk.start,
                    num_tokens=len(chunk.token_ids),
                )
            )
        return tuple(layouts)

    def _token_ids(
        self, decode: Sequence[DecodeRow], chunks: Sequence[ChunkRow], previous_ids: mx.array | None
    ) -> mx.array:
        """Flat token ids [T]; those of the step before are picked from `previous_ids` on the device."""
        host = np.fromiter(
            chain((row.token_id for row in decode), *(chunk.token_ids for chunk in chunks)), np.int32
        )
        on_device = [index for index, row in enumerate(decode) if row.token_id == NOT_ON_HOST]
        if not on_device:
            return mx.array(host)
        if previous_ids is None:
            raise EngineError("a step asks for tokens of the step before, which sampled none")
        sources = [row.source for row in decode]
        if len(on_device) == len(host) == previous_ids.size and sources == list(range(len(host))):
            return previous_ids
        count = int(previous_ids.size)
        pick = np.arange(count, count + len(host), dtype=np.int32)
        pick[on_device] = [sources[index] for index in on_device]
        return mx.concatenate([previous_ids, mx.array(host)])[mx.array(pick)]

    def _tail_write(
        self,
        rows: _StableRows | None,
        chunks: Sequence[ChunkRow],
        positions: np.ndarray,
        bounds: np.ndarray,
    ) -> TailWrite | None:
        """Decode rows write their token; a chunk writes what is left behind its last full block."""
        num_decode = int(bounds[0])
        slots = [rows.host_slots] if rows else []
        tokens = [np.arange(num_decode, dtype=np.int32)]
        for chunk, begin, end in zip(chunks, bounds[:-1], bounds[1:], strict=True):
            stop = chunk.start + int(end - begin)
            rest = stop - max(stop // self._block_size * self._block_size, chunk.start)
            tokens.append(np.arange(end - rest, end, dtype=np.int32))
            slots.append(np.full(rest, chunk.slot, np.int32))
        if not chunks:
            places = TailPlaces(slots[0], positions % self._tail_len)
            return TailWrite(None, places)
        flat = np.concatenate(tokens)
        if not len(flat):
            return None
        places = TailPlaces(np.concatenate(slots), positions[flat] % self._tail_len)
        return TailWrite(mx.array(flat), places)

    def _pending(self, chunks: Sequence[ChunkRow], bounds: np.ndarray) -> tuple[PendingWrite | None, ...]:
        """Blocks that chunks complete: [flushed, last block boundary], from the tail up to the chunk's start.

            flushed ........ start ........ boundary ... end
            held by the tail | fresh tokens             | stays in the tail
        """
        size = self._block_size
        total = int(bounds[-1])
        held_slots: list[np.ndarray] = []
        held_positions: list[np.ndarray] = []
        num_held = 0
        sources: list[list[np.ndarray]] = [[] for _ in range(self._num_groups)]
        block_ids: list[list[int]] = [[] for _ in range(self._num_groups)]
        for chunk, begin, end in zip(chunks, bounds[:-1], bounds[1:], strict=True):
            flushed, start, stop = chunk.view.flushed, chunk.start, chunk.start + int(end - begin)
            count = max(0, stop // size - flushed // size)
            if count == 0:
                continue
            span = np.arange(flushed, flushed + count * size, dtype=np.int32)
            held = span[span < start]
            index = np.where(span >= start, begin + span - start, total + num_held + span - flushed)
            if len(held):
                held_positions.append(held)
                held_slots.append(np.full(len(held), chunk.slot, np.int32))
                num_held += len(held)
            blocks = index.reshape(count, size)
            for group, ids in enumerate(chunk.new_blocks):
                if len(ids) != count:
                    raise EngineError(f"a chunk fills {count} blocks, but its plan names {len(ids)}")
                kept = [i for i, block_id in enumerate(ids) if block_id is not None]
                sources[group].append(blocks[kept])
                block_ids[group] += [block_id for block_id in ids if block_id is not None]
        places = None
        if num_held:
            ring = np.concatenate(held_positions) % self._tail_len
            places = TailPlaces(np.concatenate(held_slots), ring)
        return tuple(
            PendingWrite(
                mx.array(np.concatenate(own).astype(np.int32)), places, mx.array(np.array(ids, np.int32))
            )
            if ids
            else None
            for own, ids in zip(sources, block_ids, strict=True)
        )
