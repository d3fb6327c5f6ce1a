"""A few steps on made-up tokens when a model loads: kernels are compiled and checked, and the peak is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxbatch.request import Request, SamplingParams
from mlxbatch.scheduling.groups import KVMemory
from mlxbatch.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from mlxbatch.execution.model_runner import ModelRunner

_MIB = 1 << 20


def warm_up(runner: ModelRunner, *, rows: int, max_num_batched_tokens: int, max_model_len: int) -> int:
    """Run a full step of prompt tokens, a prompt with a cached prefix, and `rows` decode rows.

    Returns the bytes that a step takes beside weights and KV memory, as observed. Leaves the runner as it was.
    """
    import mlx.core as mx

    size = runner.block_size
    tokens = min(max_num_batched_tokens, max_model_len - 4 * size)
    blocks = 2 * (max_num_batched_tokens // size + rows + 8)
    budget = sum((blocks + 1) * group.bytes_per_block for group in runner.groups)
    kv = KVMemory(runner.groups, size, budget)
    scheduler = Scheduler(
        kv,
        max_num_seqs=rows,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        tail_len=runner.tail_len,
    )
    before = int(mx.get_active_memory()) - runner.kv.nbytes
    held = 0

    def run(prompts: list[tuple[int, ...]]) -> None:
        nonlocal held
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            scheduler.add(Request(str(number), prompt, params))
        while (plan := scheduler.plan(0.0)) is not None:
            result = runner.launch(plan).result()
            held = max(held, runner.kv.nbytes)
            scheduler.commit(plan, result, 0.0)

    prompt = (1,) * max(1, tokens)
    run([prompt])
    run([(*prompt[: max(1, tokens - size)], 2, 3, 4), *((5,) for _ in range(rows - 1))])
    scheduler.shrink_idle()
    run([])
    return max(_MIB, runner.kv.peak_bytes - before - held)
