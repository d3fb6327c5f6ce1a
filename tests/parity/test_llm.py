"""`LLM` on a tiny model: what a user of vLLM's class expects, and what must not depend on neighbours."""

from __future__ import annotations

import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest
import tiny_models
from greedy_oracle import greedy

from mlxbatch import LLM, SamplingParams
from mlxbatch.errors import RequestError, UsageError
from mlxbatch.llm import engine_config

PROMPTS = ["The capital of France is", "A request joins", "Blocks are written once, shared by", "x"]
RANDOM_KEY_BYTES = 8  # MLX keeps one for every thread, and that of an LLM never ends


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_models.write_dir("llama", path)
    return str(path)


@pytest.fixture(scope="module")
def llm(model_dir):
    with LLM(model=model_dir, max_num_seqs=4, max_num_batched_tokens=64, block_size=8) as llm:
        yield llm


def test_the_listing_from_vllm_runs(model_dir):
    llm = LLM(
        model=model_dir,
        tensor_parallel_size=1,
        max_num_batched_tokens=4096,
        max_num_seqs=8,
        gpu_memory_utilization=0.90,
        dtype="float16",
    )
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.7, max_tokens=20))
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        assert output.finished and output.outputs[0].finish_reason in ("stop", "length")
        assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt)
    llm.close()


def test_greedy_answers_are_mlx_lm_s_in_the_order_given(llm):
    tokenizer = llm.get_tokenizer()
    model = llm.engine.loaded.model
    params = [SamplingParams(temperature=0, max_tokens=3 + 7 * i, ignore_eos=True) for i in range(4)]
    outputs = llm.generate(PROMPTS, params)
    for prompt, one, output in zip(PROMPTS, params, outputs, strict=True):
        want = greedy(model, tokenizer.encode(prompt), one.max_tokens).token_ids
        assert output.outputs[0].token_ids == want
        assert output.outputs[0].text == tokenizer.decode(want)
        assert output.outputs[0].finish_reason == "length"


def test_one_prompt_token_ids_and_chat(llm):
    ids = llm.get_tokenizer().encode("A request")
    params = SamplingParams(temperature=0, max_tokens=4)
    results = [llm.generate(prompt, params)[0] for prompt in ("A request", ids, {"prompt_token_ids": ids})]
    assert len({tuple(r.outputs[0].token_ids) for r in results}) == 1
    one = llm.chat([{"role": "user", "content": "hello"}], params)
    two = llm.chat([[{"role": "user", "content": "hello"}]] * 2, params)
    assert [r.outputs[0].token_ids for r in two] == [one[0].outputs[0].token_ids] * 2


def test_a_seeded_request_does_not_depend_on_its_neighbours(llm):
    seeded = SamplingParams(temperature=1.0, top_p=0.95, top_k=40, seed=7, max_tokens=25, ignore_eos=True)
    alone = llm.generate(PROMPTS[0], seeded)[0].outputs[0].token_ids
    others = SamplingParams(temperature=1.3, max_tokens=30, presence_penalty=0.5)
    beside = llm.generate([*PROMPTS, PROMPTS[0], *PROMPTS], [others] * 4 + [seeded] + [others] * 4)
    assert beside[4].outputs[0].token_ids == alone
    again = llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, seed=8, max_tokens=25, ignore_eos=True))
    assert again[0].outputs[0].token_ids != alone


def test_n_answers_differ_and_the_first_is_the_single_one(llm):
    params = SamplingParams(n=3, temperature=1.2, seed=3, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(PROMPTS[2], params)[0].outputs
    assert [output.index for output in outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    single = SamplingParams(temperature=1.2, seed=3, max_tokens=12, ignore_eos=True)
    assert llm.generate(PROMPTS[2], single)[0].outputs[0].token_ids == outputs[0].token_ids


def test_logprobs_are_the_models_own(llm):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True)
    output = llm.generate(PROMPTS[0], params)[0]
    entries = output.outputs[0].logprobs
    assert entries is not None and len(entries) == 5
    model, ids = llm.engine.loaded.model, list(output.prompt_token_ids)
    for entry, token in zip(entries, output.outputs[0].token_ids, strict=True):
        logits = model(mx.array([ids]))[0, -1].astype(mx.float32)
        want = logits - mx.logsumexp(logits)
        assert entry.token_id == token and len(entry.top) == 3
        assert entry.top[0] == (token, pytest.approx(entry.logprob))
        assert entry.logprob == pytest.approx(want[token].item(), abs=1e-4)
        assert [logprob for _, logprob in entry.top] == sorted((v for _, v in entry.top), reverse=True)
        ids.append(token)


def test_stream_gives_the_same_text_and_closing_it_cancels(llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    whole = llm.generate(PROMPTS[1], params)[0].outputs[0]
    deltas = list(llm.stream(PROMPTS[1], params))
    assert "".join(delta.text for delta in deltas) == whole.text
    stream = llm.stream(PROMPTS[1], params)
    next(stream)
    stream.close()
    llm.generate("x", SamplingParams(max_tokens=1))
    assert llm.engine.core.scheduler.slots.num_used == 0


def test_streams_in_turn_lose_nothing(llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    whole = [output.outputs[0].text for output in llm.generate(PROMPTS, params)]
    texts = [""] * len(PROMPTS)
    streams = dict(enumerate(llm.stream(prompt, params) for prompt in PROMPTS))
    while streams:
        for number, stream in list(streams.items()):
            delta = next(stream, None)
            if delta is None:
                del streams[number]
            else:
                texts[number] += delta.text
    assert texts == whole


def test_a_stream_goes_on_after_other_requests(llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    whole = llm.generate(PROMPTS[1], params)[0].outputs[0].text
    stream = llm.stream(PROMPTS[1], params)
    first = next(stream).text
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert first + "".join(delta.text for delta in stream) == whole


def test_threads_share_one_llm_and_leave_it_usable(llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    whole = [output.outputs[0].text for output in llm.generate(PROMPTS, params)]
    for _ in range(2):
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            texts = list(pool.map(lambda prompt: llm.generate(prompt, params)[0].outputs[0].text, PROMPTS))
        assert texts == whole
    assert llm.generate(PROMPTS[0], params)[0].outputs[0].text == whole[0]


def test_an_exception_in_the_middle_of_a_stream_is_the_callers_own(llm):
    stream = llm.stream("x", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    with pytest.raises(KeyError):
        stream.throw(KeyError("mine"))
    assert llm.generate("x", SamplingParams(max_tokens=2, ignore_eos=True))[0].finished


def test_logit_bias_and_stop_token_ids(llm):
    params = SamplingParams(temperature=0, max_tokens=6, logit_bias={77: 100}, ignore_eos=True)
    assert llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids == [77] * 6
    stopped = SamplingParams(temperature=0, max_tokens=6, logit_bias={77: 100}, stop_token_ids=[77])
    output = llm.generate(PROMPTS[0], stopped)[0].outputs[0]
    assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == ([77], "", "stop", 77)


def test_wrong_arguments_are_named(model_dir):
    with pytest.raises(UsageError, match="tensor_parallel_size=2"):
        LLM(model=model_dir, tensor_parallel_size=2)
    with pytest.raises(UsageError, match="no argument swap_space"):
        LLM(model=model_dir, swap_space=4)
    for name, wrong in (("policy", "silly"), ("dtype", "int3"), ("max_num_seqs", "many"), ("kv_memory", "4 lots")):
        with pytest.raises(UsageError, match=name):
            LLM(model=model_dir, **{name: wrong})


def test_settings_are_read_as_on_the_command_line():
    config = engine_config("m", {"max_num_seqs": "auto", "kv_memory": "4GB", "tpot_target": "50ms", "revision": None})
    assert (config.max_num_seqs, config.kv_memory, config.tpot_target) == (0, 4 * 10**9, 0.05)
    assert engine_config(Path("a/b"), {"adapter": Path("c")}).adapter == "c"
    plain = engine_config("m", {"kv_memory": 10**9, "tpot_target": 0.5, "seed": 3, "enable_prefix_caching": False})
    assert (plain.kv_memory, plain.tpot_target, plain.seed, plain.prefix_caching) == (10**9, 0.5, 3, False)


@pytest.mark.parametrize("prompts", [None, 5, [None], [1, "x"], [["x"]], {"text": "x"}])
def test_what_is_no_prompt_is_named(llm, prompts):
    with pytest.raises(UsageError, match="prompt"):
        llm.generate(prompts)


def test_messages_that_are_none_are_named(llm):
    with pytest.raises(UsageError, match="list of messages"):
        llm.chat("hi")


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "hot"},
        {"temperature": None},
        {"n": 2.5},
        {"max_tokens": 2.5},
        {"top_k": None},
        {"stop": 5},
        {"stop_token_ids": ["x"]},
        {"logit_bias": {"5": 1}},
        {"max_tokens": 2**64},
    ],
)
def test_a_parameter_of_a_wrong_type_is_named(wrong):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wrong)
    assert caught.value.param == next(iter(wrong))


def test_a_prompt_that_cannot_fit_raises_and_leaves_the_engine_usable(llm):
    with pytest.raises(RequestError, match="the context holds 2048"):
        llm.generate(["x", [5] * 3000], SamplingParams(max_tokens=2))
    assert len(llm.generate("x", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2


def test_closing_gives_the_memory_back(model_dir):
    gc.collect()
    before = mx.get_active_memory()
    llm = LLM(model=model_dir, max_num_seqs=4, max_num_batched_tokens=64)
    llm.generate(PROMPTS, SamplingParams(max_tokens=5))
    assert mx.get_active_memory() > before
    llm.close()
    gc.collect()
    assert mx.get_active_memory() <= before + RANDOM_KEY_BYTES
    with pytest.raises(UsageError, match="closed"):
        llm.generate("x")


def test_closing_in_the_middle_of_a_stream_ends_it(model_dir):
    llm = LLM(model=model_dir, max_num_seqs=4, max_num_batched_tokens=64)
    stream = llm.stream("x", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(UsageError, match="closed"):
        list(stream)
    with pytest.raises(UsageError, match="closed"):
        next(llm.stream("x"))


LEFT_OPEN = """
import atexit, sys
from mlxbatch import LLM, SamplingParams
closed = LLM(sys.argv[1], max_num_seqs=4, max_num_batched_tokens=64)
atexit.register(closed.close)
llm = LLM(sys.argv[1], max_num_seqs=16, max_num_batched_tokens=64)
params = SamplingParams(max_tokens=50, ignore_eos=True)
streams = [llm.stream("x" * 20, params) for _ in range(8)]
print(all(next(stream).token_ids for stream in streams))
"""


def test_a_program_may_end_with_an_open_llm_and_stream(model_dir):
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, model_dir], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
