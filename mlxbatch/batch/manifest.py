"""What a run was started with, kept beside its output, so that a resumed run is the same run.

`answers.jsonl` has `answers.jsonl.run.json`. It is written before the first record and never changed.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from mlxbatch import __version__
from mlxbatch.batch.index import InputIndex
from mlxbatch.batch.item import BatchFormat, RequestDefaults
from mlxbatch.config import EngineConfig
from mlxbatch.errors import UsageError

# What decides the tokens of an answer. The rest of EngineConfig decides only how fast they come.
MODEL_FIELDS = ("model", "revision", "adapter", "dtype", "import_bits", "max_model_len", "chat_template_args")

FINGERPRINT = "fingerprint"  # of the model's files: known once the model is loaded


class Manifest(msgspec.Struct, kw_only=True):
    """Sections of plain JSON values. `input_path` and `version` are for people and are not compared."""

    version: str = __version__
    input_path: str | None = None
    input: dict[str, Any]
    model: dict[str, Any]
    parameters: dict[str, Any]
    output: dict[str, Any]

    def differences(self, now: Manifest) -> list[str]:
        """One sentence for every value that differs in `now`."""
        found = []
        for section in ("input", "model", "parameters", "output"):
            old, new = getattr(self, section), getattr(now, section)
            for name in sorted(old.keys() | new.keys()):
                before, after = old.get(name), new.get(name)
                if before == after or (name == FINGERPRINT and None in (before, after)):
                    continue
                if name in ("sha256", FINGERPRINT):
                    found.append(f"the content of the {section} has changed")
                else:
                    found.append(f"{section}: {name} was {_shown(before)} and is now {_shown(after)}")
        return found


def new_manifest(
    *,
    input_path: str | None,
    index: InputIndex,
    format: BatchFormat,
    config: EngineConfig,
    defaults: RequestDefaults,
    output: Path,
    errors: Path | None,
    order: str,
) -> Manifest:
    values = config.as_dict()
    return Manifest(
        input_path=None if input_path is None else _utf8(input_path),
        input={"sha256": index.sha256, "requests": index.requests, "format": format},
        model={name: values[name] for name in MODEL_FIELDS},
        # Through JSON, so that what is compared has the types that come back from the file.
        parameters=msgspec.json.decode(msgspec.json.encode(asdict(defaults))),
        output={
            "order": order,
            "errors": None if errors is None else _utf8(os.path.relpath(errors.resolve(), output.resolve().parent)),
        },
    )


def _utf8(path: str) -> str:
    """The same whatever the locale, and for any bytes that a file may be called."""
    return os.fsencode(path).decode(errors="replace")


def manifest_path(output: Path) -> Path:
    return output.with_name(output.name + ".run.json")


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Whole or not at all. Raises UsageError when it cannot be written."""
    temporary = path.with_name(path.name + ".new")
    try:
        with open(temporary, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def read_manifest(path: Path) -> Manifest:
    """Raises UsageError when it is missing or not one of ours."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        reason = "is missing"
    except (OSError, msgspec.MsgspecError) as error:
        reason = f"cannot be read ({error})"
    raise UsageError(
        f"{path} {reason}, so nothing says what this output was made from; start anew with --overwrite or another -o"
    )


def _shown(value: object) -> str:
    return "not set" if value is None else msgspec.json.encode(value).decode()
