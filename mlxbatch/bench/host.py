"""Python's time per step: the shipped scheduler, loop and text assembly around a model that does nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import count

from tokenizers import Tokenizer, decoders, models

from mlxbatch.engine.core import EngineCore
from mlxbatch.models.tokenizer import FastCodec, ModelTokenizer
from mlxbatch.request import Request, SamplingParams
from mlxbatch.scheduling.groups import KVMemory
from mlxbatch.scheduling.plan import GroupSpec, StepPlan, StepResult
from mlxbatch.scheduling.scheduler import Scheduler

ROWS, BLOCK = 32, 16
STEPS = 160  # ten flushes
REPETITIONS = 15


class _Handle:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class NullRunner:
    """Answers every step at once, with tokens that make words."""

    groups = (GroupSpec("full", (0,), None, 1),)
    block_size = BLOCK
    tail_len = 2 * BLOCK

    def __init__(self, vocab: int) -> None:
        self._ids = count()
        self._vocab = vocab

    def launch(self, plan: StepPlan) -> _Handle:
        rows = len(plan.samples)
        ids = [next(self._ids) % self._vocab for _ in range(rows)]
        return _Handle(StepResult(ids, [True] * rows, [None] * rows))


def word_tokenizer(words: int = 1000) -> ModelTokenizer:
    vocabulary = {f"▁word{i}": i for i in range(words)} | {"<unk>": words}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return ModelTokenizer(
        FastCodec(tokenizer), eos_token_ids=frozenset(), bos_token_id=None, special_tokens={}, chat_template=None
    )


def decoding_core(context: int, rows: int = ROWS) -> EngineCore:
    """An engine all of whose rows are decoding, at about `context` positions: each at another place in its block, so
    that rows at every context fill their tails alike, one after another."""
    kv = KVMemory(NullRunner.groups, BLOCK, 10**9)
    scheduler = Scheduler(
        kv, max_num_seqs=rows, max_num_batched_tokens=8192, max_model_len=10**6, tail_len=NullRunner.tail_len
    )
    core = EngineCore(scheduler, NullRunner(1000), word_tokenizer())
    params = SamplingParams(temperature=0, max_tokens=STEPS * (REPETITIONS + 2), ignore_eos=True)
    for row in range(rows):
        core.submit(Request(str(row), (row,) * (context + row), params))
    while len(scheduler.running) < rows or not all(seq.is_decoding for seq in scheduler.running):
        core.step()
    return core


def seconds_per_step(contexts: Sequence[int]) -> list[list[float]]:
    """Processor time per step at each context, a mean over STEPS steps, in each of REPETITIONS rounds. The contexts
    take turns in every round, so that a slow minute of the machine meets all of them."""
    cores = [decoding_core(context) for context in contexts]
    rounds: list[list[float]] = [[] for _ in cores]
    for _ in range(REPETITIONS):
        for seconds, core in zip(rounds, cores, strict=True):
            began = time.thread_time()
            for _ in range(STEPS):
                core.step()
            seconds.append((time.thread_time() - began) / STEPS)
    return rounds


def measure_host(contexts: Sequence[int] = (100, 1_000, 8_000, 32_000)) -> list[dict[str, float]]:
    """The least time of each context, and the median over rounds of its ratio to the first context."""
    rounds = seconds_per_step(contexts)
    return [
        {
            "rows": ROWS,
            "context": context,
            "milliseconds": 1e3 * min(seconds),
            "ratio": statistics.median(own / first for own, first in zip(seconds, rounds[0], strict=True)),
        }
        for context, seconds in zip(contexts, rounds, strict=True)
    ]
