"""Chunks beside running chats, through the shipped scheduler and a runner that computes nothing."""

from __future__ import annotations

import pytest
from memory_runner import MemoryRunner

from mlxbatch.capacity.chat_budget import ChatBudget
from mlxbatch.capacity.cost_model import StepCostModel
from mlxbatch.request import Priority, Request, SamplingParams
from mlxbatch.scheduling.groups import KVMemory
from mlxbatch.scheduling.plan import GroupSpec
from mlxbatch.scheduling.scheduler import Scheduler
from mlxbatch.scheduling.sequence import Sequence


class Times:
    """10 ms a step, 1 ms a decode row, 0.5 ms a prompt token."""

    def seconds(
        self, rows: int, prefill_tokens: int = 0, context: float = 0.0, *, prefill_context: float | None = None
    ) -> float:
        return 0.010 + 0.001 * rows + 0.0005 * prefill_tokens


class Loop:
    def __init__(self, block_size: int = 16) -> None:
        group = GroupSpec("full", (0,), None, 1)
        budget = ChatBudget(StepCostModel(Times(), source="guess"), block_size=block_size)
        self.scheduler = Scheduler(
            KVMemory((group,), block_size, 10_000),
            max_num_seqs=8,
            max_num_batched_tokens=512,
            max_model_len=10_000,
            tail_len=2 * block_size,
            prefill_budget=budget,
        )
        self.runner = MemoryRunner((group,), block_size, 2 * block_size)
        self.everyone: list[Sequence] = []

    def add(self, name: str, prompt: int, priority: Priority, max_tokens: int = 100) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        first = 10_000 * (1 + self.scheduler.num_unfinished)  # no prefix in common
        request = Request(name, tuple(range(first, first + prompt)), params, priority=priority)
        self.everyone += self.scheduler.add(request)

    def step(self) -> tuple[int, int]:
        """(decode rows, prompt tokens) of the step that was run."""
        plan = self.scheduler.plan(0.0)
        if plan is None:
            return 0, 0
        self.scheduler.commit(plan, self.runner.launch(plan).result(), 0.0)
        return len(plan.decode), plan.num_chunk_tokens


CHAT, BATCH = Priority.INTERACTIVE, Priority.BATCH


def test_batch_prompts_take_whole_steps_while_no_chat_is_decoding() -> None:
    loop = Loop()
    loop.add("short", 10, BATCH)
    loop.step()
    loop.add("long", 2000, BATCH)
    assert [loop.step() for _ in range(2)] == [(1, 511), (1, 511)]


def test_beside_a_chat_batch_prompts_at_most_double_a_step() -> None:
    loop = Loop(block_size=8)
    loop.add("chat", 10, CHAT)
    loop.step()
    loop.add("long", 2000, BATCH)
    # 11 ms without prompts, so 22 ms with them: two blocks take 8 ms more, three would take 12.
    assert [loop.step() for _ in range(4)] == [(1, 16)] * 4


def test_the_whole_step_is_back_when_the_chat_has_its_answer() -> None:
    loop = Loop()
    loop.add("chat", 10, CHAT, max_tokens=3)
    loop.step()
    loop.add("long", 2000, BATCH)
    steps = [loop.step() for _ in range(4)]
    assert steps[:2] == [(1, 16)] * 2
    assert steps[2:] == [(0, 512)] * 2


def test_a_prompt_of_another_chat_is_computed_at_once() -> None:
    loop = Loop()
    loop.add("chat", 10, CHAT)
    loop.step()
    loop.add("second", 300, CHAT)
    loop.add("long", 2000, BATCH)
    assert loop.step() == (1, 300 + 16), "and a block of the batch prompt moves on"


def test_a_chats_first_token_does_not_wait_for_whole_steps_of_batch_prompts() -> None:
    loop = Loop(block_size=8)
    loop.add("batch", 10, BATCH)
    loop.step()
    loop.add("long", 2000, BATCH)
    assert loop.step() == (1, 511)
    loop.add("chat", 20, CHAT)
    # 21 ms with the chat's prompt, so 42 ms with others: seven blocks take 39 ms, eight would take 43.
    assert loop.step() == (1, 56)


@pytest.mark.parametrize("tokens", [30, 64, 200, 512, 600])
def test_chats_that_never_cease_do_not_stop_batch_prompts(tokens: int) -> None:
    loop = Loop()
    loop.add("long", 2000, BATCH, max_tokens=1)
    loop.add("after", 40, BATCH, max_tokens=1)
    loop.step()
    for number in range(300):
        loop.add(f"chat-{number}", tokens, CHAT, max_tokens=1)
        loop.step()
    batch = [seq for seq in loop.everyone if seq.request.priority is BATCH]
    assert [seq.finish_reason for seq in batch] == ["length"] * 2


def test_a_prompt_that_was_preempted_too_often_is_computed_before_a_chat_at_once() -> None:
    loop = Loop()
    loop.add("displaced", 500, BATCH)
    loop.everyone[0].num_preemptions = 2
    loop.add("chat", 20, CHAT)
    assert [loop.step() for _ in range(2)] == [(0, 512), (1, 8)]


def test_a_chat_that_comes_alone_is_computed_in_whole_steps() -> None:
    loop = Loop()
    loop.add("chat", 1000, CHAT)
    assert [loop.step()[1] for _ in range(2)] == [512, 488]


@pytest.mark.parametrize("block_size", [8, 32])
def test_a_block_moves_on_however_slow_prompts_are(block_size: int) -> None:
    loop = Loop(block_size)
    loop.scheduler.prefill_budget._cost.mixed_drift.observe(1.0, 100.0)
    loop.add("chat", 10, CHAT)
    loop.step()
    loop.add("long", 20 * block_size, BATCH)
    steps = [loop.step() for _ in range(20)]
    assert steps == [(1, block_size)] * 20
    assert loop.step() == (2, 0)
