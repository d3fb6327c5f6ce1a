"""The warm-up leaves no trace: the engine's tokens and memory are as without it."""

from __future__ import annotations

import mlx.core as mx
import tiny_models

from mlxbatch.engine.warm_up import warm_up
from mlxbatch.execution.model_runner import ModelRunner
from mlxbatch.models import load


def test_warm_up_measures_a_step_and_gives_its_blocks_back(tmp_path):
    tiny_models.write_dir("gemma3_text", tmp_path)
    loaded = load(str(tmp_path))
    runner = ModelRunner(loaded.model, block_size=8)
    took = warm_up(runner, rows=4, max_num_batched_tokens=256, max_model_len=1024)
    logits = 4 * loaded.model.args.vocab_size * 4
    assert took >= logits
    assert runner.kv.num_blocks == (1,) * len(runner.groups)
    assert runner.kv.flush_overruns == 0
    mx.synchronize()
