"""The value that the scheduler hands to the model runner, and what comes back.

A step's tokens are laid out flat, decode rows first, then the chunks one after another:

    token   0 ........ R-1 | R ......... R+n0-1 | R+n0 ..... T-1
            decode rows    | chunk 0            | chunk 1

Where a row's K and V live while the step runs (p0 = first position of this step's tokens):

    position  0 ............ flushed .............. p0 ........ p0+n
    source    pool blocks  | the slot's tail      | this step's own K and V
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from mlxbatch.request import SamplingParams, TokenLogprob

NOT_ON_HOST = -1  # token id of an input that was sampled by the step before and is still on the device
ZERO_BLOCK = 0  # reserved in every pool: padding points here, never at somebody's memory


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV group: layers that attend alike and so share block ids and tables.

    `window` is None for full attention. `bytes_per_block` covers K and V of all layers of the group.
    """

    name: str
    layers: tuple[int, ...]
    window: int | None
    bytes_per_block: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Pool blocks of one sequence in one group: `ids[i]` holds block number `first + i`.

    `ids` is int32 and never written to, though its memory is shared with longer tables of the same sequence.
    Blocks left of a sliding window have been given back, hence `first`.
    """

    first: int
    ids: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class KVView:
    """Where positions [0, flushed) of a sequence are. Replaced, never changed, when blocks are flushed,
    so `is` tells whether device copies of its tables are still right."""

    flushed: int
    tables: tuple[BlockTable, ...]  # one for each group


class DecodeRow(NamedTuple):
    """One token of one sequence. `source` indexes the samples of the step before, if token_id is NOT_ON_HOST."""

    seq_id: int
    slot: int
    position: int
    token_id: int
    source: int
    view: KVView


class ChunkRow(NamedTuple):
    """Tokens [start, start + len(token_ids)) of one prompt (or of a recomputed sequence).

    `new_blocks[g][i]` is the pool block of group g that block number `view.flushed // block_size + i`
    will be flushed to before the next step; None when it lies wholly left of the window. The rest of the
    tokens, less than a block, goes into the slot's tail. All ids are known on the host.
    """

    seq_id: int
    slot: int
    start: int
    token_ids: tuple[int, ...]
    view: KVView
    new_blocks: tuple[tuple[int | None, ...], ...]


class SampleRow(NamedTuple):
    """Sample one token from the hidden state of flat token `token_index`, to stand at `position`.

    Several rows may name one token_index (forks). `history` holds prompt and output ids and is only read for
    rows with penalties; `seed` is always set. The ids in flight are not in `history` yet.
    """

    seq_id: int
    slot: int
    token_index: int
    position: int
    params: SamplingParams
    seed: int
    suppress: tuple[int, ...]  # ids that min_tokens forbids at this position
    num_prompt_tokens: int
    history: list[int]


class TailCopy(NamedTuple):
    """After this step's writes, slot `dst` gets a copy of slot `src` (a fork)."""

    src: int
    dst: int


class TailBlock(NamedTuple):
    """Positions [start, start + block_size) of `slot`'s tail are a full block: write them to these pool blocks,
    one for each group (None: left of its window)."""

    slot: int
    start: int
    block_ids: tuple[int | None, ...]


class BlockMove(NamedTuple):
    group: int
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Flush:
    """Pool writes, in this order: growth (to `num_blocks[g]` blocks), the chunks of the step before (`pending`),
    `moves`, `tail_blocks`, then shrinking. They run before the forward pass of the plan that carries them.

    All sources of moves are read before any destination is written, and no two moves share a destination.
    Moves come before tail blocks: a plan moves blocks first and then names tail blocks by their new ids, while
    the step before named its chunks' blocks by the old ones."""

    num_blocks: tuple[int, ...]
    pending: bool
    moves: tuple[BlockMove, ...] = ()
    tail_blocks: tuple[TailBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Without rows it is a flush alone."""

    step: int
    num_slots: int  # tail slots that must exist, a power of two; one scratch slot more is the runner's own
    decode: tuple[DecodeRow, ...] = ()
    chunks: tuple[ChunkRow, ...] = ()
    samples: tuple[SampleRow, ...] = ()
    tail_copies: tuple[TailCopy, ...] = ()
    flush: Flush | None = None
    released_slots: tuple[int, ...] = ()  # slots whose state (penalty counts, recurrent state) is stale
    off_target: bool = False  # a latency target left no room for this step's prefill

    @property
    def num_chunk_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + self.num_chunk_tokens

    @property
    def has_rows(self) -> bool:
        return bool(self.decode or self.chunks)


class StepResult(NamedTuple):
    """Read back from the device: one entry for each SampleRow, in order.

    `finite[i]` is False when the row's logits held no finite maximum; its token id is then meaningless.
    """

    token_ids: list[int]
    finite: list[bool]
    logprobs: list[TokenLogprob | None]


class StepHandle(Protocol):
    """A step that has been submitted and may still be running."""

    def result(self) -> StepResult:
        """Wait for the step and read its samples. May be called once."""
        ...


class Runner(Protocol):
    """Runs plans in the order given. The scheduler may build plan t+1 while t runs."""

    @property
    def groups(self) -> tuple[GroupSpec, ...]: ...

    @property
    def block_size(self) -> int: ...

    @property
    def tail_len(self) -> int: ...

    def launch(self, plan: StepPlan) -> StepHandle: ...
