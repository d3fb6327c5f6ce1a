"""The default model as it comes from PyPI, against llama.cpp's own reading of the same file.

The ids below were printed once by llama.cpp (through node-llama-cpp 3.22, temperature 0, one thread).
"""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from mlxbatch.models import load
from mlxbatch.models.loaded import LoadedModel

QUESTION = "What is the capital of France? Answer in one sentence."
PROMPT = "<|im_start|>user\n" + QUESTION + "<|im_end|>\n<|im_start|>assistant\n"
PROMPT_IDS = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 19842, 281, 582, 6330, 30, 2, 198, 1, 520, 9531, 198]
ANSWER_IDS = [504, 3575, 282, 4649, 314, 7042, 30, 2]


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load("smollm2-135m")


def greedy(loaded: LoadedModel, prompt: list[int], limit: int = 40) -> list[int]:
    ids: list[int] = []
    for token, _ in generate_step(mx.array(prompt), loaded.model, max_tokens=limit):
        ids.append(int(token))
        if ids[-1] in loaded.eos_token_ids:
            break
    return ids


def test_prompt_ids_and_answer_are_those_of_llama_cpp(smollm2: LoadedModel) -> None:
    assert smollm2.tokenizer.encode(PROMPT) == PROMPT_IDS
    assert greedy(smollm2, PROMPT_IDS) == ANSWER_IDS


def test_the_chat_template_leads_to_the_known_answer(smollm2: LoadedModel) -> None:
    prompt = smollm2.tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    assert smollm2.tokenizer.decode(prompt, skip_special_tokens=False).startswith("<|im_start|>system\nYou are")
    assert prompt.count(1) == 3  # <|im_start|> is also BOS, and is not put in front once more
    answer = greedy(smollm2, prompt)
    assert smollm2.tokenizer.decode(answer) == "The capital of France is Paris."
    assert smollm2.max_model_len == 8192
    assert smollm2.dtype == mx.float32
