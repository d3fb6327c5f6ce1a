"""The promise between engine and client: whatever tokens a client has when the engine dies, resuming from them
gives the text that the undisturbed answer would have had. Proved on the engine's own loop, cut at every delta."""

from __future__ import annotations

import pytest
from letter_tokenizer import LetterTokenizer
from memory_runner import MemoryRunner

from mlxbatch.engine.core import EngineCore
from mlxbatch.errors import RequestError
from mlxbatch.request import OutputDelta, Request, SamplingParams
from mlxbatch.scheduling.groups import KVMemory
from mlxbatch.scheduling.plan import GroupSpec
from mlxbatch.scheduling.scheduler import Scheduler

PROMPT = tuple(range(3, 14))


def new_core() -> EngineCore:
    groups = (GroupSpec("full", (0,), None, 1),)
    kv = KVMemory(groups, 8, 201, prefix_caching=True)
    runner = MemoryRunner(groups, 8, 16, seeded=True)
    scheduler = Scheduler(kv, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=400, tail_len=16)
    return EngineCore(scheduler, runner, LetterTokenizer(frozenset()))


def answer(params: SamplingParams, resume: tuple[int, ...] = ()) -> list[OutputDelta]:
    core = new_core()
    core.submit(Request("r", PROMPT, params, resume_token_ids=resume))
    deltas: list[OutputDelta] = []
    while core.has_unfinished:
        deltas += core.step()
    return deltas


def tokens_and_text(deltas: list[OutputDelta]) -> tuple[tuple[int, ...], str]:
    return tuple(token for delta in deltas for token in delta.token_ids), "".join(delta.text for delta in deltas)


def some_text() -> str:
    return tokens_and_text(answer(SamplingParams(seed=1, max_tokens=40)))[1]


STOPS = {
    "no stop": {},
    "a stop in the middle": {"stop": [some_text()[17:21]]},
    "a stop that min_tokens lets pass": {"stop": [some_text()[5:8], some_text()[30:33]], "min_tokens": 20},
    "a stop across the end of min_tokens": {"stop": [some_text()[18:24]], "min_tokens": 20},
    "starts of stops everywhere": {"stop": [letter + "#" for letter in sorted(set(some_text()))]},
    "the stop is kept": {"stop": [some_text()[17:21]], "include_stop_str_in_output": True},
}


@pytest.mark.parametrize("name", STOPS)
def test_resuming_at_every_delta_gives_the_undisturbed_text(name: str) -> None:
    params = SamplingParams(seed=1, max_tokens=40, **STOPS[name])  # type: ignore[arg-type]
    whole = answer(params)
    expected = tokens_and_text(whole)
    for cut in range(len(whole)):
        had = whole[:cut]
        rest = answer(params, tokens_and_text(had)[0])
        assert tokens_and_text([*had, *rest]) == expected, f"cut after {cut} deltas"
        assert (rest[-1].finish_reason, rest[-1].stop_reason) == (whole[-1].finish_reason, whole[-1].stop_reason)


def test_resume_tokens_outside_the_vocabulary_are_refused() -> None:
    core = new_core()
    with pytest.raises(RequestError, match="resume_token_ids: token id 50"):
        core.submit(Request("r", PROMPT, SamplingParams(max_tokens=5), resume_token_ids=(1, 50)))
