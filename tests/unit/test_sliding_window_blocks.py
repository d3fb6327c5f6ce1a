"""A sequence holds no more blocks of a window group than its window needs, and none is written in vain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from memory_runner import MemoryRunner, next_token

from mlxbatch.request import Request, SamplingParams
from mlxbatch.scheduling.groups import KVMemory
from mlxbatch.scheduling.plan import GroupSpec, StepPlan
from mlxbatch.scheduling.scheduler import Scheduler
from mlxbatch.scheduling.sequence import Sequence

FULL, WINDOW = 0, 1
# block size, window, longest chunk: longer than the window, as long, shorter, and shorter than a block
SIZES = [(4, 16, 16), (4, 16, 6), (4, 16, 40), (4, 10, 7), (4, 10, 3), (8, 32, 64), (8, 9, 40), (8, 3, 20)]
WINDOWS = 8  # how many windows long a sequence gets


class Case:
    """One sequence, run to its end: half of it prompt, or nearly all."""

    def __init__(
        self, block_size: int, window: int, chunk: int, prefix_caching: bool = True, prompt_windows: int = 4
    ) -> None:
        self.block_size, self.window, self.chunk = block_size, window, chunk
        groups = (GroupSpec("full", (0,), None, 10), GroupSpec("window", (1,), window, 10))
        self.kv = KVMemory(groups, block_size, 10_000, prefix_caching=prefix_caching)
        self.runner = MemoryRunner(groups, block_size, 2 * block_size)  # raises if a row reads what is not there
        self.num_prompt = window * prompt_windows
        self.num_new = window * (WINDOWS - prompt_windows) or 1
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=1,
            max_num_batched_tokens=chunk + 1,
            max_model_len=self.num_prompt + self.num_new,
            tail_len=2 * block_size,
        )

    def steps(self) -> Iterator[tuple[StepPlan, int]]:
        """Each plan, with the number of the window group's blocks that the sequence holds while it runs and after,
        those included that its chunk is about to fill."""
        ids = [i % 50 for i in range(self.num_prompt)]
        request = Request("0", tuple(ids), SamplingParams(max_tokens=self.num_new, ignore_eos=True))
        [sequence] = self.scheduler.add(request)
        while (plan := self.scheduler.plan(0.0)) is not None:
            self.scheduler.check()
            during = self.held(sequence)
            self.scheduler.commit(plan, self.runner.launch(plan).result(), 0.0)
            yield plan, max(during, self.held(sequence))
        for _ in range(self.num_new):
            ids.append(next_token(ids))
        assert sequence.token_ids == ids


    @staticmethod
    def held(sequence: Sequence) -> int:
        return sum(i is not None for i in sequence.kv.tables[WINDOW].ids) if sequence.kv is not None else 0


def left_of_window(case: Case, number: int, position: int) -> bool:
    """Whether `position`, which sees (position - window, position], sees nothing of block `number`."""
    return (number + 1) * case.block_size - 1 <= position - case.window


@pytest.mark.parametrize("prompt_windows", [4, WINDOWS])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_blocks_held_stay_within_the_window(sizes, prefix_caching, prompt_windows):
    case = Case(*sizes, prefix_caching, prompt_windows)
    most = case.window // case.block_size + 2
    tokens = 0
    largest = 0
    for plan, held in case.steps():
        assert held <= most, plan
        largest = max(largest, held)
        tokens += plan.num_tokens
        for row in (*plan.decode, *plan.chunks):
            assert len(row.view.tables[WINDOW].ids) <= most
            if row.view.flushed > case.window:
                assert len(row.view.tables[FULL].ids) == row.view.flushed // case.block_size
    assert tokens >= case.window * WINDOWS - 1
    assert largest >= case.window // case.block_size, "the window itself is held"


@pytest.mark.parametrize("sizes", SIZES)
def test_blocks_left_of_the_window_are_never_flushed(sizes):
    case = Case(*sizes)
    skipped = 0
    for plan, _ in case.steps():
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.token_ids)
            for index, block_id in enumerate(chunk.new_blocks[WINDOW]):
                gone = left_of_window(case, chunk.view.flushed // case.block_size + index, end)
                assert (block_id is None) == gone
                skipped += gone
            assert None not in chunk.new_blocks[FULL]
        for tail in plan.flush.tail_blocks if plan.flush else ():
            assert tail.block_ids[WINDOW] is not None or left_of_window(
                case, tail.start // case.block_size, tail.start + 2 * case.block_size
            )
    assert skipped or case.chunk <= case.window, "chunks longer than the window must leave blocks out"


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_sequence_alone_gets_the_window_groups_idle_blocks_at_once(prefix_caching: bool) -> None:
    """The window group's pool grew while memory was free. Taking one block at a time from it would recompute the
    sequence for every block."""
    groups = (GroupSpec("window", (0,), 8, 10), GroupSpec("full", (1,), None, 10))
    kv = KVMemory(groups, 16, 0, prefix_caching=prefix_caching)
    kv.budget = kv.limit = kv.bytes_alone(1024) + 20
    runner = MemoryRunner(groups, 16, 32)
    scheduler = Scheduler(kv, max_num_seqs=1, max_num_batched_tokens=512, max_model_len=1024, tail_len=32)
    ids = [i % 50 for i in range(800)]
    [sequence] = scheduler.add(Request("0", tuple(ids), SamplingParams(max_tokens=224, ignore_eos=True)))
    while scheduler.num_unfinished:
        plan = scheduler.plan(0.0)
        scheduler.check()
        if plan is not None:
            scheduler.commit(plan, runner.launch(plan).result(), 0.0)
    for _ in range(224):
        ids.append(next_token(ids))
    assert sequence.token_ids == ids
    assert sequence.num_preemptions <= 2
