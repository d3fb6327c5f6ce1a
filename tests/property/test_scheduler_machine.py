"""Random arrivals, cancellations and memory changes against a runner that checks every read."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_runner import MemoryRunner, next_token

from mlxbatch.errors import RequestError
from mlxbatch.request import Priority, Request, SamplingParams
from mlxbatch.scheduling.groups import KVMemory
from mlxbatch.scheduling.plan import GroupSpec
from mlxbatch.scheduling.scheduler import Scheduler
from mlxbatch.scheduling.sequence import Sequence


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([4, 8]),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 40),
        blocks=st.integers(14, 60),
        window=st.sampled_from([None, 3, 8, 13]),
        prefix=st.booleans(),
        run_ahead=st.booleans(),
    )
    def start(self, block_size, max_num_seqs, extra_budget, blocks, window, prefix, run_ahead):
        groups = [GroupSpec("full", (0,), None, 10)]
        if window:
            groups.append(GroupSpec("window", (1,), window, 10))
        self.kv = KVMemory(groups, block_size, (blocks + 2) * 10 * len(groups), prefix_caching=prefix)
        self.full_budget = self.kv.budget
        tail_len = 2 * block_size
        self.runner = MemoryRunner(tuple(groups), block_size, tail_len)
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + block_size + extra_budget,
            max_model_len=block_size * 12,
            tail_len=tail_len,
        )
        self.run_ahead = run_ahead
        self.in_flight = None
        self.sequences: list[Sequence] = []
        self.cancelled: set[str] = set()
        self.now = 0.0
        self.count = 0
        self.prompts: list[tuple[int, ...]] = [(1, 2, 3)]

    @rule(
        data=st.data(),
        n=st.sampled_from([1, 1, 1, 3]),
        max_tokens=st.integers(1, 30),
        priority=st.sampled_from(list(Priority)),
        shared=st.booleans(),
    )
    def add(self, data, n, max_tokens, priority, shared):
        limit = self.scheduler.max_model_len - max_tokens
        base = data.draw(st.sampled_from(self.prompts)) if shared else ()
        more = data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=40))
        prompt = (*base, *more)[:limit]
        self.prompts.append(prompt)
        self.count += 1
        request = Request(
            str(self.count),
            prompt,
            SamplingParams(n=n, max_tokens=max_tokens),
            priority=priority,
            arrival=self.now,
        )
        try:
            self.sequences += self.scheduler.add(request)
        except RequestError as error:  # only while the budget is cut
            assert error.code == "kv_cache_exceeded" and self.kv.budget < self.full_budget

    @rule(data=st.data())
    def cancel(self, data):
        if self.sequences:
            seq = data.draw(st.sampled_from(self.sequences))
            self.cancelled.add(seq.request.request_id)
            self.scheduler.cancel(seq.request.request_id, self.now)

    @rule(share=st.sampled_from([1.0, 0.7, 0.3, 0.1]))
    def change_budget(self, share):
        self.scheduler.set_kv_budget(int(self.full_budget * share))

    @rule()
    def shrink(self):
        self.scheduler.shrink_idle()

    @rule(steps=st.integers(1, 25))
    def run(self, steps):
        for _ in range(steps):
            if not self.step():
                break

    def step(self) -> bool:
        """One iteration of the engine's loop; False when nothing is left."""
        self.now += 1
        plan = self.scheduler.plan(self.now)
        self.scheduler.check()
        handle = None
        if plan is not None:
            assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
            assert len(plan.decode) <= self.scheduler.slots.max_slots
            handle = self.runner.launch(plan)
        ready = [self.in_flight] if self.run_ahead else [(plan, handle) if plan else None]
        for pair in ready:
            if pair is not None:
                self.scheduler.commit(pair[0], pair[1].result(), self.now)
                self.scheduler.check()
        progressed = plan is not None or (self.run_ahead and self.in_flight is not None)
        self.in_flight = (plan, handle) if self.run_ahead and plan is not None else None
        return progressed

    @precondition(lambda self: hasattr(self, "kv"))
    @invariant()
    def pools_are_sound(self):
        self.kv.check()

    def teardown(self):
        if not hasattr(self, "kv"):
            return
        self.scheduler.set_kv_budget(self.full_budget)
        idle = 0
        for _ in range(5000):
            idle = 0 if self.step() else idle + 1
            if idle > 2:
                break
        assert not self.scheduler.has_work, self.scheduler.wait_reason
        assert all(pool.num_used == 0 for pool in self.kv.pools)
        for seq in self.sequences:
            if seq.request.request_id in self.cancelled:
                continue
            assert seq.finish_reason == "length"
            prompt = list(seq.request.prompt_token_ids)
            assert seq.token_ids[len(prompt) :] == expected_tokens(prompt, seq.request.params.max_tokens)


SchedulerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestScheduler = SchedulerMachine.TestCase
