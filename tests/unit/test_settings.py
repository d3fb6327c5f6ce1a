"""Settings: flags before variables before config.toml, each refused by the name of where it stands."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from mlxbatch.cli.engine import add_process_flags, launch_options
from mlxbatch.config import EngineConfig
from mlxbatch.errors import UsageError
from mlxbatch.process.frames import encode
from mlxbatch.process.messages import EncodeChat
from mlxbatch.settings import ENGINE_SETTINGS, TABLES, Sources, add_engine_flags, config_path, engine_config


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return parser.parse_args(flags)


def sources(environ: dict[str, str] | None = None, **engine: Any) -> Sources:
    return Sources(environ or {}, {"engine": engine})


def test_nothing_named_is_the_default_config() -> None:
    assert engine_config(parsed(), sources()) == EngineConfig()


def test_the_first_source_wins() -> None:
    below = sources({"MLXBATCH_BLOCK_SIZE": "8", "MLXBATCH_MAX_NUM_SEQS": "4"}, block_size=32, dtype="float16")
    assert engine_config(parsed(), below).block_size == 8
    config = engine_config(parsed("--block-size", "16"), below)
    assert (config.block_size, config.max_num_seqs, config.dtype) == (16, 4, "float16")


def test_every_setting_reads_from_every_source() -> None:
    flags = ["-m", "m", "--revision", "r", "--adapter", "a", "--dtype", "float16", "--max-num-seqs", "8"]
    flags += ["--max-num-batched-tokens", "256", "--max-model-len", "1000", "--block-size", "8"]
    flags += ["--kv-memory", "4GB", "--gpu-memory-utilization", "0.5", "--no-prefix-cache", "--attention", "metal"]
    flags += ["--policy", "shortest", "--mode", "throughput", "--tpot-target", "50ms", "--ttft-target", "2s"]
    flags += ["--deterministic", "--import-bits", "4", "--chat-template-args", '{"enable_thinking": false}']
    expected = EngineConfig(
        model="m",
        revision="r",
        adapter="a",
        dtype="float16",
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_model_len=1000,
        block_size=8,
        kv_memory=4_000_000_000,
        gpu_memory_utilization=0.5,
        prefix_caching=False,
        attention="metal",
        policy="shortest",
        mode="throughput",
        tpot_target=0.05,
        ttft_target=2.0,
        deterministic=True,
        import_bits=4,
        chat_template_args={"enable_thinking": False},
    )
    assert engine_config(parsed(*flags), sources()) == expected
    texts = {
        setting.variable: str(getattr(expected, setting.name)).replace("'", '"').replace("False}", "false}")
        for setting in ENGINE_SETTINGS
    }
    assert engine_config(parsed(), sources(texts)) == expected
    table = {setting.name: getattr(expected, setting.name) for setting in ENGINE_SETTINGS}
    assert engine_config(parsed(), sources(**table)) == expected


def test_every_field_of_the_config_but_its_seed_can_be_set() -> None:
    assert {setting.name for setting in ENGINE_SETTINGS} | {"seed"} == set(EngineConfig().as_dict())


@pytest.mark.parametrize(
    ("flags", "environ", "table", "said"),
    [
        (["--block-size", "x"], {}, {}, "--block-size: must be a whole number, not 'x'"),
        (["--dtype", "int8"], {}, {}, "--dtype: must be one of auto, float32"),
        (["--kv-memory", "4 apples"], {}, {}, "--kv-memory: cannot read '4 apples'"),
        ([], {"MLXBATCH_PREFIX_CACHING": "maybe"}, {}, "MLXBATCH_PREFIX_CACHING: must be true or false"),
        (
            [],
            {},
            {"gpu_memory_utilization": "much"},
            "config.toml: [engine] gpu_memory_utilization: must be a number",
        ),
        ([], {}, {"max_num_seqs": True}, "config.toml: [engine] max_num_seqs: must be a whole number"),
        ([], {}, {"max_num_seq": 4}, "unknown setting 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ([], {}, {"model": 5}, "config.toml: [engine] model: must be text"),
        (["--chat-template-args", "[1]"], {}, {}, "--chat-template-args: must be a JSON object"),
        (["--chat-template-args", f'{{"a": [{10**30}]}}'], {}, {}, "-args: has a number of more than 64 bits"),
        (["--chat-template-args", '{"a": -9223372036854775809}'], {}, {}, "-args: has a number of more than 64 bits"),
        ([], {}, {"chat_template_args": {"a": {"b": 2**64}}}, "chat_template_args: has a number of more"),
        (["--chat-template-args", '{"a": %s}' % ("[" * 200 + "]" * 200)], {}, {}, "-args: is nested more than 200"),
        (["--chat-template-args", '{"a": ' + "[" * 10**5], {}, {}, "--chat-template-args: must be a JSON object"),
        (["--chat-template-args", '{"a": "\\ud800"}'], {}, {}, "--chat-template-args: must be UTF-8 text"),
        (["--chat-template-args", '{"messages": 1}'], {}, {}, "--chat-template-args: the messages are the"),
        (["--block-size", "7"], {}, {}, "block size must be 8, 16 or 32"),
    ],
)
def test_a_wrong_value_is_refused_where_it_stands(
    flags: list[str], environ: dict[str, str], table: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        engine_config(parsed(*flags), sources(environ, **table))
    assert said in str(caught.value)


def test_template_arguments_reach_as_far_as_a_message_does() -> None:
    config = engine_config(parsed("--chat-template-args", f'{{"most": {2**64 - 1}, "least": {-(2**63)}}}'), sources())
    assert config.chat_template_args == {"most": 2**64 - 1, "least": -(2**63)}
    encode(EncodeChat(call=1, messages=[], template_args=config.chat_template_args))


def test_auto_is_a_number_of_rows() -> None:
    assert engine_config(parsed("--max-num-seqs", "auto"), sources(max_num_seqs=4)).max_num_seqs == 0


def test_an_empty_variable_is_no_setting() -> None:
    assert engine_config(parsed(), sources({"MLXBATCH_MODEL": ""})) == EngineConfig()


def test_a_config_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        '[engine]\nmodel = "m"\nkv_memory = "2GiB"\nchat_template_args = {k = 1}\n[run]\ntemperature = 0\n'
    )
    loaded = Sources.load({}, path)
    config = engine_config(parsed(), loaded)
    assert (config.model, config.kv_memory, config.chat_template_args) == ("m", 2 * 2**30, {"k": 1})
    assert loaded.tables["run"] == {"temperature": 0}
    assert Sources.load({}, tmp_path / "missing.toml").tables == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model = ", "cannot read"),
        ('model = "m"', "put it under [engine]"),
        ("[engin]\n", "did you mean 'engine'?"),
        ("engine = 3", "must be a table"),
    ],
)
def test_a_wrong_config_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        Sources.load({}, tmp_path / "config.toml")
    assert said in str(caught.value)
    assert "config.toml" in str(caught.value)


@pytest.mark.parametrize("tokens", ["0", "-5", "16"])
def test_a_step_that_could_hold_no_chunk_beside_a_row_is_refused(tokens: str) -> None:
    with pytest.raises(UsageError, match=r"max_num_batched_tokens .* at least .*1 \+ 16 = 17"):
        engine_config(parsed("--max-num-batched-tokens", tokens), sources())
    assert engine_config(parsed("--max-num-batched-tokens", "17"), sources()).max_num_batched_tokens == 17


def test_text_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(UsageError, match="--model: must be UTF-8 text"):
        engine_config(parsed("-m", "caf\udce9"), sources())


def test_a_negative_context_is_refused() -> None:
    with pytest.raises(UsageError, match="max_model_len must be at least 1"):
        engine_config(parsed("--max-model-len=-1"), sources())


def test_the_config_file_lies_in_the_users_configuration_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    import platformdirs

    monkeypatch.delenv("MLXBATCH_CONFIG", raising=False)
    assert config_path() == Path(platformdirs.user_config_dir("mlxbatch")) / "config.toml"
    monkeypatch.setenv("MLXBATCH_CONFIG", "/elsewhere.toml")
    assert config_path() == Path("/elsewhere.toml")


def test_every_command_has_a_table() -> None:
    from mlxbatch.cli.main import COMMANDS

    assert set(TABLES) == {"engine", *COMMANDS}


def test_how_the_process_runs_is_set_like_everything_else() -> None:
    parser = argparse.ArgumentParser()
    add_process_flags(parser)

    def options(*flags: str, environ: dict[str, str] | None = None, **engine: Any) -> tuple[float | None, bool]:
        chosen = launch_options(parser.parse_args(flags), sources(environ, **engine))
        return chosen.idle_exit, chosen.allow_sleep

    assert options() == (1800.0, False)
    assert options(idle_exit="2h", allow_sleep=True) == (7200.0, True)
    assert options(environ={"MLXBATCH_IDLE_EXIT": "never"}, idle_exit=90) == (None, False)
    assert options("--idle-exit", "5min", environ={"MLXBATCH_IDLE_EXIT": "never"}) == (300.0, False)
    assert options("--allow-sleep", environ={"MLXBATCH_ALLOW_SLEEP": "0"}, allow_sleep=False) == (1800.0, True)
    assert options(environ={"MLXBATCH_ALLOW_SLEEP": "no"}, allow_sleep=True) == (1800.0, False)
    with pytest.raises(UsageError, match=r"MLXBATCH_IDLE_EXIT: .*'soon'.*or never"):
        options(environ={"MLXBATCH_IDLE_EXIT": "soon"})


def test_a_command_that_starts_no_engine_process_takes_the_whole_engine_table() -> None:
    assert engine_config(parsed(), sources(idle_exit="never", block_size=8)) == EngineConfig(block_size=8)
