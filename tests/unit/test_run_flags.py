"""Flags of `mlxbatch run` that shape the engine reach it, in this process and in one of its own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
import tiny_models
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

from mlxbatch.capacity.chat_budget import ChatBudget
from mlxbatch.capacity.latency_budget import LatencyBudget
from mlxbatch.cli import run as run_command
from mlxbatch.config import EngineConfig
from mlxbatch.engine.local import LocalEngine
from mlxbatch.process.launcher import LaunchOptions, engine_command
from mlxbatch.process.paths import RuntimeDir, engine_key
from mlxbatch.request import Request, SamplingParams
from mlxbatch.scheduling.policy import EarliestDue, FirstComeFirstServed, ShortestFirst
from mlxbatch.settings import Sources, engine_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write_dir("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA with weights large enough to change what is said."""
    folder = tmp_path_factory.mktemp("adapter")
    settings = {"rank": 4, "scale": 20.0, "dropout": 0.0}
    worn, _ = load_model(model)
    linear_to_lora_layers(worn, 2, settings)
    mx.random.seed(3)
    weights = {
        name: mx.random.normal(array.shape)
        for name, array in tree_flatten(worn.parameters())
        if name.endswith(("lora_a", "lora_b"))
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    values = {"num_layers": 2, "lora_parameters": settings, "fine_tune_type": "lora"}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def config_of(model: Path, *flags: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    run_command.add_parser(parser.add_subparsers())
    command = ["run", "-i", "in.txt", "-m", str(model), "--kv-memory", "4MB", "--max-num-seqs", "4", *flags]
    return engine_config(parser.parse_args(command), Sources())


def engine_of(model: Path, *flags: str) -> LocalEngine:
    """The engine that `mlxbatch run --in-process` opens."""
    engine = run_command.open_local_engine(config_of(model, *flags), progress=lambda *work: None, trace=False)
    assert isinstance(engine, LocalEngine)
    return engine


def answer(engine: LocalEngine) -> list[int]:
    engine.submit(Request("a", (5, 6, 7, 8), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)))
    ids: list[int] = []
    while engine.has_unfinished:
        ids += [token for delta in engine.poll() for token in delta.token_ids]
    return ids


@pytest.mark.parametrize(
    ("flag", "kind"), [("fcfs", FirstComeFirstServed), ("shortest", ShortestFirst), ("priority", EarliestDue)]
)
def test_the_policy(model: Path, flag: str, kind: type[Any]) -> None:
    engine = engine_of(model, "--policy", flag)
    assert type(engine.core.scheduler.policy) is kind
    engine.close()


def test_the_target_for_tokens(model: Path) -> None:
    engine = engine_of(model, "--tpot-target", "50ms")
    assert isinstance(engine.core.scheduler.prefill_budget, LatencyBudget)
    assert engine.core.metrics.targets.tpot == 0.05
    engine.close()
    engine = engine_of(model)
    assert isinstance(engine.core.scheduler.prefill_budget, ChatBudget)
    engine.close()


@pytest.mark.parametrize(("mode", "tokens", "target"), [("interactive", 256, 0.05), ("throughput", 2048, None)])
def test_the_mode(model: Path, mode: str, tokens: int, target: float | None) -> None:
    engine = engine_of(model, "--mode", mode)
    assert engine.core.scheduler.max_num_batched_tokens == tokens
    assert engine.core.metrics.targets.tpot == target
    engine.close()


def test_the_adapter(model: Path, adapter: Path) -> None:
    plain, worn = engine_of(model), engine_of(model, "--adapter", str(adapter))
    assert plain.model_fingerprint != worn.model_fingerprint
    assert answer(plain) != answer(worn)
    plain.close()
    worn.close()


def test_an_engine_process_is_started_with_them_and_an_adapter_has_one_of_its_own(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    flags = ["--policy", "shortest", "--mode", "interactive", "--tpot-target", "70ms", "--adapter", str(adapter)]
    config = config_of(model, *flags)
    command = engine_command(config, RuntimeDir(tmp_path, tmp_path), LaunchOptions())
    arrived = msgspec.json.decode(command[command.index("--config") + 1], type=EngineConfig)
    assert arrived == config
    assert (arrived.policy, arrived.mode, arrived.tpot_target) == ("shortest", "interactive", 0.07)
    assert engine_key(config) != engine_key(config_of(model, *flags[:-2]))
