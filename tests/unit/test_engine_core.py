"""The engine's loop on a runner that checks every read, with a tokenizer of letters."""

from __future__ import annotations

import math
import random

import pytest
from letter_tokenizer import LetterTokenizer
from memory_runner import MemoryRunner, next_token

from mlxbatch.engine.core import EngineCore
from mlxbatch.errors import RequestError
from mlxbatch.request import OutputDelta, Priority, Request, SamplingParams
from mlxbatch.scheduling.groups import KVMemory
from mlxbatch.scheduling.plan import GroupSpec
from mlxbatch.scheduling.scheduler import Scheduler

BLOCK = 8


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def make_core(
    *, rows=4, budget_tokens=64, blocks=200, eos=(), run_ahead=True, seeded=False, prefix=True
) -> EngineCore:
    groups = (GroupSpec("full", (0,), None, 1),)
    kv = KVMemory(groups, BLOCK, blocks + 1, prefix_caching=prefix)
    runner = MemoryRunner(groups, BLOCK, 2 * BLOCK, seeded=seeded)
    scheduler = Scheduler(
        kv,
        max_num_seqs=rows,
        max_num_batched_tokens=budget_tokens,
        max_model_len=400,
        tail_len=2 * BLOCK,
        eos_token_ids=eos,
    )
    return EngineCore(scheduler, runner, LetterTokenizer(frozenset(eos)), run_ahead=run_ahead, clock=FakeClock())


def finish_all(core: EngineCore) -> dict[str, list[list[OutputDelta]]]:
    outputs: dict[str, list[list[OutputDelta]]] = {}
    while core.has_unfinished:
        for delta in core.step():
            per_index = outputs.setdefault(delta.request_id, [])
            while len(per_index) <= delta.index:
                per_index.append([])
            per_index[delta.index].append(delta)
        core.scheduler.check()
    return outputs


def tokens_of(deltas: list[OutputDelta]) -> list[int]:
    return [t for delta in deltas for t in delta.token_ids]


def text_of(deltas: list[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def continuation(prompt: tuple[int, ...], count: int, seed: int = 0) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids, seed))
    return ids[len(prompt) :]


PROMPT = tuple(range(1, 30))


def recorded(core) -> list[str]:
    """Launches and reads, in the order in which they happen from now on."""
    order: list[str] = []
    launch = core.runner.launch

    def recording(plan):
        order.append(f"launch {plan.step}" + (" with a prompt" if plan.chunks else ""))
        handle = launch(plan)
        read = handle.result

        def result():
            order.append(f"read {plan.step}")
            return read()

        handle.result = result
        return handle

    core.runner.launch = recording
    return order


def test_a_step_is_read_after_the_next_one_was_launched():
    core = make_core()
    core.submit(Request("a", PROMPT, SamplingParams(max_tokens=10)))
    finish_all(core)
    runner = core.runner
    launched = [plan.step for plan in runner.launches if plan.has_rows]
    assert runner.reads == launched == list(range(10))
    core = make_core()
    order = recorded(core)
    core.submit(Request("a", PROMPT[:9], SamplingParams(max_tokens=5)))
    finish_all(core)
    # Step 1 flushes the blocks of the prompt, so it waits for step 0; no other step waits for the one before it.
    assert order[:8] == [
        *("launch 0 with a prompt", "read 0", "launch 1", "launch 2", "read 1", "launch 3", "read 2"),
        "launch 4",
    ]


def test_what_was_sampled_is_out_before_a_prompt_is_computed():
    core = make_core()
    core.submit(Request("a", PROMPT[:3], SamplingParams(max_tokens=40)))
    for _ in range(3):
        core.step()
    order = recorded(core)
    core.submit(Request("b", PROMPT[10:13], SamplingParams(max_tokens=2)))
    assert tokens_of(core.step())
    assert order == []  # the step in flight was launched before
    core.step()
    assert order[0] == "launch 4 with a prompt"


def test_a_known_finish_costs_no_row_and_an_eos_at_most_one():
    core = make_core()
    core.submit(Request("a", PROMPT, SamplingParams(max_tokens=7)))
    finish_all(core)
    assert sum(len(plan.decode) for plan in core.runner.launches) == 6
    expected = continuation(PROMPT, 20)
    eos = expected[5]
    core = make_core(eos=(eos,))
    core.submit(Request("a", PROMPT, SamplingParams(max_tokens=20)))
    out = finish_all(core)["a"][0]
    count = expected.index(eos) + 1
    assert tokens_of(out) == expected[:count] and out[-1].finish_reason == "stop"
    assert sum(len(plan.decode) for plan in core.runner.launches) == count - 1 + 1


@pytest.mark.parametrize("run_ahead", [False, True])
def test_forks_share_their_prompt(run_ahead):
    core = make_core(rows=3, run_ahead=run_ahead, seeded=True)
    core.submit(Request("a", PROMPT, SamplingParams(n=3, max_tokens=12, seed=5, temperature=1.0)))
    deltas = finish_all(core)["a"]
    assert len(deltas) == 3 and len({tuple(tokens_of(d)) for d in deltas}) == 3
    assert core.metrics.prefill_tokens == len(PROMPT)
    assert any(plan.tail_copies for plan in core.runner.launches)


def test_forks_beyond_the_slots_follow_and_hit_the_prompt():
    core = make_core(rows=2)
    core.submit(Request("a", PROMPT, SamplingParams(n=5, max_tokens=4)))
    deltas = finish_all(core)["a"]
    assert [tokens_of(d) for d in deltas] == [continuation(PROMPT, 4)] * 5
    assert core.metrics.prefill_tokens < 2 * len(PROMPT) + 5 * BLOCK


def test_requests_with_one_prefix_compute_it_once():
    core = make_core(rows=8, budget_tokens=32)
    shared = tuple(i % 50 for i in range(100))
    for i in range(8):
        core.submit(Request(str(i), (*shared, i + 1, i + 2, i + 3), SamplingParams(max_tokens=2)))
    finish_all(core)
    assert core.metrics.prefill_tokens + core.metrics.decode_tokens < 103 + 8 * (BLOCK + 2)


def test_stop_strings_match_over_token_boundaries_and_release_held_text():
    expected = continuation(PROMPT, 30)
    whole = LetterTokenizer().decode(expected)
    stop = whole[9:13]
    at = whole.find(stop)
    core = make_core()
    core.submit(Request("a", PROMPT, SamplingParams(max_tokens=30, stop=[stop, whole[28:30] + "#"])))
    out = finish_all(core)["a"][0]
    assert text_of(out) == whole[:at]
    assert (out[-1].finish_reason, out[-1].stop_reason) == ("stop", stop)
    core = make_core()
    core.submit(Request("a", PROMPT, SamplingParams(max_tokens=30, stop=[whole[-2:] + "#"])))
    out = finish_all(core)["a"][0]
    assert text_of(out) == whole and out[-1].finish_reason == "length"


def test_min_tokens_hold_back_eos_and_stop_strings():
    expected = continuation(PROMPT, 30)
    whole = LetterTokenizer().decode(expected)
    core = make_core()
    core.submit(Request("a", PROMPT, SamplingParams(max_tokens=30, min_tokens=20, stop=[whole[3]])))
    out = finish_all(core)["a"][0]
    assert len(tokens_of(out)) >= 20
    core = make_core(eos=(7,))
    core.submit(Request("a", PROMPT, SamplingParams(max_tokens=30, min_tokens=4, stop_token_ids=[9])))
    finish_all(core)
    suppressed = [s.suppress for plan in core.runner.launches for s in plan.samples]
    assert suppressed[:5] == [(7, 9)] * 4 + [()]


def test_cancel_leaves_no_slot_and_no_block():
    core = make_core()
    core.submit(Request("a", PROMPT, SamplingParams(max_tokens=50)))
    core.submit(Request("b", PROMPT[:5], SamplingParams(max_tokens=5)))
    core.step()
    core.cancel("a")
    outputs = finish_all(core)
    assert outputs["a"][0][-1].finish_reason == "abort"
    assert tokens_of(outputs["b"][0])[-4:] == continuation(PROMPT[:5], 5)[-4:]
    assert core.scheduler.slots.num_used == 0 and core.scheduler.kv.pools[0].num_used == 0


def test_a_resumed_request_goes_on_where_it_was():
    expected = continuation(PROMPT, 12)
    core = make_core()
    request = Request("a", PROMPT, SamplingParams(max_tokens=12), resume_token_ids=tuple(expected[:5]))
    core.submit(request)
    out = finish_all(core)["a"][0]
    assert tokens_of(out) == expected[5:]


def test_an_overflow_ends_its_own_row_only():
    core = make_core()
    core.submit(Request("a", PROMPT, SamplingParams(max_tokens=9)))
    core.submit(Request("b", PROMPT[:4], SamplingParams(max_tokens=9)))
    core.runner.non_finite_at.add((0, len(PROMPT) + 3))
    outputs = finish_all(core)
    last = outputs["a"][0][-1]
    assert last.finish_reason == "error" and "overflow" in (last.error or "")
    assert tokens_of(outputs["b"][0]) == continuation(PROMPT[:4], 9)


def test_an_interactive_request_preempts_the_newest_batch_row():
    core = make_core(rows=2)
    for name in ("old", "new"):
        core.submit(Request(name, PROMPT, SamplingParams(max_tokens=40), arrival=core.clock()))
    for _ in range(5):
        core.step()
    core.submit(Request("chat", PROMPT[:3], SamplingParams(max_tokens=3), Priority.INTERACTIVE, arrival=core.clock()))
    outputs = finish_all(core)
    assert core.scheduler.num_preemptions == 1
    assert any(event.request_id == "new" for event in core.events if event.kind == "preempt")
    assert tokens_of(outputs["chat"][0]) == continuation(PROMPT[:3], 3)


def test_requests_that_never_fit_are_refused_with_the_arithmetic():
    core = make_core(blocks=10)
    with pytest.raises(RequestError, match=r"29 prompt tokens \+ 390 new tokens = 419, but the context holds 400"):
        core.submit(Request("a", PROMPT, SamplingParams(max_tokens=390)))
    with pytest.raises(RequestError, match=r"= 129, but the whole KV cache holds 87"):
        core.submit(Request("a", PROMPT, SamplingParams(max_tokens=100)))
    with pytest.raises(RequestError, match="Shorten the prompt to fewer than 400 tokens"):
        core.submit(Request("a", [1] * 400, SamplingParams(max_tokens=1)))
    with pytest.raises(RequestError, match="fewer than 87 tokens, or raise --kv-memory"):
        core.submit(Request("a", [1] * 87, SamplingParams(max_tokens=1)))
    with pytest.raises(RequestError, match="no tokens") as empty:
        core.check(Request("a", [], SamplingParams(max_tokens=1)))
    assert empty.value.code == "empty_prompt"
    core.submit(Request("a", PROMPT, SamplingParams(max_tokens=None)))
    assert len(tokens_of(finish_all(core)["a"][0])) == 87 - 29


def perfect_steps(jobs: list[tuple[int, int]], rows: int, budget: int) -> int:
    """Steps of a perfect first-come schedule: (prompt, output) lengths, at most `rows` running, at most `budget`
    tokens a step, decodes first, then prompts in order of arrival."""
    waiting, running, steps = list(jobs), [], 0
    while waiting or running:
        while waiting and len(running) < rows:
            prompt, output = waiting.pop(0)
            running.append([prompt, output])
        left = budget
        for job in running:
            if job[0] == 0:
                job[1] -= 1
                left -= 1
        for job in running:
            if job[0] > 0 and left > 0:
                taken = min(job[0], left)
                job[0] -= taken
                left -= taken
                if job[0] == 0:
                    job[1] -= 1
                    job.append(steps)
        running = [job for job in running if job[1] > 0]
        steps += 1
    return steps


@pytest.mark.parametrize(("rows", "budget"), [(4, 64), (8, 32), (16, 128)])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_steps_are_within_two_percent_of_a_perfect_schedule(rows, budget, run_ahead):
    random_numbers = random.Random(rows * budget)
    jobs = [(random_numbers.randint(2, 90), random_numbers.randint(1, 60)) for _ in range(120)]
    core = make_core(rows=rows, budget_tokens=budget, blocks=20000, run_ahead=run_ahead)
    for i, (prompt, output) in enumerate(jobs):
        ids = tuple((i * 7 + p * p) % 50 for p in range(prompt))
        core.submit(Request(str(i), ids, SamplingParams(max_tokens=output, ignore_eos=True)))
    finish_all(core)
    assert core.scheduler.num_preemptions == 0
    ideal = perfect_steps(jobs, rows, budget)
    assert math.isclose(core.metrics.steps, ideal, rel_tol=0.02), (core.metrics.steps, ideal)
