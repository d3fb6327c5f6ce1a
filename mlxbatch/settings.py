"""Settings from flags, then MLXBATCH_* variables, then config.toml in the user's configuration folder.

One `Setting` is one name everywhere: `max_num_seqs` is the flag --max-num-seqs, the variable
MLXBATCH_MAX_NUM_SEQS and the key max_num_seqs of its table, [engine] for what shapes the engine, or the
table named like the command. The first source that names a setting wins; a value that cannot be read is
refused with the name of the source it came from.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from mlxbatch.config import AttentionChoice, DType, EngineConfig
from mlxbatch.errors import UsageError
from mlxbatch.json_values import problem_for_the_engine
from mlxbatch.units import parse_bytes, parse_seconds

Reader = Callable[[Any], Any]

TABLES = ("engine", "run", "chat", "top", "plan", "tune", "simulate", "bench", "doctor", "models")


def text(value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"must be text, not {value!r}")
    return utf8(value)


def utf8(value: str) -> str:
    """`value`; raises UsageError when it came from bytes that are no UTF-8, which no model could be asked."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError("must be UTF-8 text") from None
    return value


def integer(value: object) -> int:
    try:
        if isinstance(value, (int, str)) and not isinstance(value, bool):
            return int(value)
    except ValueError:
        pass
    raise UsageError(f"must be a whole number, not {value!r}")


def integer_or_auto(value: object) -> int:
    """0 stands for "auto", as in EngineConfig."""
    return 0 if value == "auto" else integer(value)


def number(value: object) -> float:
    try:
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            return float(value)
    except ValueError:
        pass
    raise UsageError(f"must be a number, not {value!r}")


def boolean(value: object) -> bool:
    words = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise UsageError(f"must be true or false, not {value!r}")


def texts(value: object) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) for v in values):
        raise UsageError(f"must be text or a list of texts, not {value!r}")
    return tuple(map(utf8, values))


def json_object(value: object) -> dict[str, object]:
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise UsageError(f'must be a JSON object like {{"enable_thinking": false}}, not {value!r}')
    return parsed


def template_arguments(value: object) -> dict[str, object]:
    """A JSON object that the engine process can be sent."""
    arguments = json_object(value)
    problem = problem_for_the_engine(arguments)
    if problem:
        raise UsageError(problem)
    if "messages" in arguments:
        raise UsageError("the messages are the conversation's own; they cannot be set here")
    utf8(json.dumps(arguments, ensure_ascii=False, default=str))
    return arguments


def one_of(*choices: str) -> Reader:
    def read(value: object) -> str:
        if value not in choices:
            raise UsageError(f"must be one of {', '.join(choices)}, not {value!r}")
        return str(value)

    return read


def seconds_or_never(value: Any) -> float | None:
    """None stands for "never"."""
    if value == "never":
        return None
    try:
        return parse_seconds(value)
    except UsageError as error:
        raise UsageError(f"{error}, or never") from None


@dataclass(frozen=True, slots=True)
class Setting:
    """One named value and how it is read. `const` makes the flag a switch that stands for that value."""

    name: str
    read: Reader
    help: str
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    const: object = None
    repeatable: bool = False

    @property
    def flag(self) -> str:
        return self.flags[-1] if self.flags else "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "MLXBATCH_" + self.name.upper()

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        options: dict[str, Any] = {"dest": self.name, "default": None, "help": self.help}
        if self.const is not None:
            options |= {"action": "store_const", "const": self.const}
        else:
            options["metavar"] = self.metavar or self.name.rpartition("_")[2].upper()
            options |= {"action": "append"} if self.repeatable else {}
        group.add_argument(*(self.flags or (self.flag,)), **options)


ENGINE_SETTINGS = (
    Setting("model", text, "catalog name, Hugging Face repo, folder or .gguf file", flags=("-m", "--model")),
    Setting("revision", text, "branch, tag or commit of a Hugging Face repo"),
    Setting("adapter", text, "folder of a LoRA adapter to load with the model", "DIR"),
    Setting("dtype", one_of(*get_args(DType)), "auto, float32, float16 or bfloat16"),
    Setting("max_num_seqs", integer_or_auto, "most rows in a batch, or auto (the default)", "N"),
    Setting("max_num_batched_tokens", integer, "most tokens in one step, prefill and decode together", "N"),
    Setting(
        "max_model_len", integer, "longest context, prompt and answer together (default: the model's)", "N"
    ),
    Setting("block_size", integer, "tokens in one KV block: 8, 16 or 32", "N"),
    Setting(
        "kv_memory", parse_bytes, "memory for KV blocks, like 4GB (default: what the rows can fill)", "SIZE"
    ),
    Setting(
        "gpu_memory_utilization", number, "share of the GPU's working set to use (default 0.90)", "SHARE"
    ),
    Setting(
        "prefix_caching",
        boolean,
        "do not reuse KV of shared prompt prefixes",
        flags=("--no-prefix-cache",),
        const=False,
    ),
    Setting("attention", one_of(*get_args(AttentionChoice)), "auto, reference or metal"),
    Setting("policy", one_of("fcfs", "shortest", "priority"), "who goes first: fcfs, shortest or priority"),
    Setting("mode", one_of("balanced", "interactive", "throughput"), "balanced, interactive or throughput"),
    Setting("tpot_target", parse_seconds, "wanted time per output token, like 50ms", "TIME"),
    Setting("ttft_target", parse_seconds, "wanted time to first token, like 2s", "TIME"),
    Setting(
        "deterministic", boolean, "fix the number of rows, so that a GPU rounds the same way", const=True
    ),
    Setting("import_bits", integer_or_auto, "bits of weights imported from GGUF: auto, 16, 8 or 4", "BITS"),
    Setting("chat_template_args", template_arguments, "arguments for the chat template", "JSON"),
)

PROCESS_SETTINGS = (
    Setting(
        "idle_exit",
        seconds_or_never,
        "how long an engine stays without clients: 30min (the default), 2h, never",
        "TIME",
    ),
    Setting("allow_sleep", boolean, "let the Mac fall asleep while requests are running", const=True),
)


def config_path() -> Path:
    """Where config.toml is looked for. `MLXBATCH_CONFIG` names another file."""
    import platformdirs

    named = os.environ.get("MLXBATCH_CONFIG")
    return Path(named).expanduser() if named else platformdirs.user_config_path("mlxbatch") / "config.toml"


@dataclass(frozen=True, slots=True)
class Sources:
    """Where settings that no flag names come from."""

    environ: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    path: str = "config.toml"

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, path: Path | None = None) -> Sources:
        """Raises UsageError when config.toml is not TOML, or has a table or top-level key nobody reads."""
        path = path or config_path()
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            tables = {}
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"cannot read {path}: {error}") from None
        for name, table in tables.items():
            if name not in TABLES:
                where = (
                    "put it under [engine], or under the name of a command"
                    if not isinstance(table, dict)
                    else ""
                )
                raise UsageError(f"{path}: {_unknown(name, TABLES)}{where and '; ' + where}")
            if not isinstance(table, dict):
                raise UsageError(f"{path}: {name} must be a table, written [{name}]")
        return cls(dict(os.environ if environ is None else environ), tables, str(path))

    def resolve(self, args: argparse.Namespace, settings: Iterable[Setting], table: str) -> dict[str, Any]:
        """The settings that some source names, read; those that none names are left out.

        Raises UsageError for an unknown key in `table` and for a value that cannot be read.
        """
        known = tuple(settings)
        keys = self.tables.get(table, {})
        for key in keys:
            if key not in {setting.name for setting in known}:
                raise UsageError(f"{self.path}: [{table}]: {_unknown(key, [s.name for s in known])}")
        values = {}
        for setting in known:
            flagged = getattr(args, setting.name, None)
            candidates = (
                (setting.flag, flagged),
                (setting.variable, self.environ.get(setting.variable) or None),
                (f"{self.path}: [{table}] {setting.name}", keys.get(setting.name)),
            )
            for source, value in candidates:
                if value is not None:
                    try:
                        values[setting.name] = setting.read(value)
                    except UsageError as error:
                        raise UsageError(f"{source}: {error}") from None
                    break
        return values


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of EngineConfig, for every command that loads a model."""
    group = parser.add_argument_group("model and engine")
    for setting in ENGINE_SETTINGS:
        setting.add_to(group)


def engine_config(args: argparse.Namespace, sources: Sources | None = None) -> EngineConfig:
    """EngineConfig from the flags in `args` and the other sources. Raises UsageError."""
    values = _engine_table(args, sources or Sources.load())
    return EngineConfig(**{s.name: values[s.name] for s in ENGINE_SETTINGS if s.name in values})


def process_settings(args: argparse.Namespace, sources: Sources | None = None) -> dict[str, Any]:
    """Those of PROCESS_SETTINGS that some source names. Raises UsageError."""
    values = _engine_table(args, sources or Sources.load())
    return {s.name: values[s.name] for s in PROCESS_SETTINGS if s.name in values}


def _engine_table(args: argparse.Namespace, sources: Sources) -> dict[str, Any]:
    return sources.resolve(args, (*ENGINE_SETTINGS, *PROCESS_SETTINGS), "engine")


def _unknown(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"unknown setting {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
