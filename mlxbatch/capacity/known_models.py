"""Shapes by name, offline: the table of known models, a config.json, or a model folder."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from mlxbatch.capacity.model_families import read_shape
from mlxbatch.capacity.model_shape import ModelShape, Quantization
from mlxbatch.errors import ModelError

_SUFFIX = re.compile(
    r"-(instruct|it|chat|thinking|base|hf|mlx|2507|2501|v0\.\d|bf16|fp16|f16|mxfp4|q\d|\d-?bit(-dwq)?|\d+bit)$"
)
_BITS = re.compile(r"(?:^|-)(\d)-?bit(?:-|$)")


@cache
def known_models() -> Mapping[str, Mapping[str, Any]]:
    """The entries of known_models.toml by name."""
    text = resources.files("mlxbatch.capacity").joinpath("known_models.toml").read_text("utf-8")
    return tomllib.loads(text)


def _plain(name: str) -> str:
    """ "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit" -> "llama-3.1-8b"."""
    text = name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    while (shorter := _SUFFIX.sub("", text)) != text:
        text = shorter
    return text


def find_known(name: str) -> Mapping[str, Any] | None:
    """The table's entry for a catalog name or a repository, bits and variants in the name ignored."""
    plain = _plain(name)
    for key, entry in known_models().items():
        if plain in (key, _plain(str(entry["repo"]))):
            return entry
    return None


def bits_in_name(name: str) -> Quantization | None:
    """The quantisation that a name such as "Qwen3-8B-4bit" states."""
    if "mxfp4" in name.lower():
        return Quantization(4, 32, "mxfp4")
    match = _BITS.search(name.rsplit("/", 1)[-1].lower())
    return Quantization(int(match[1])) if match and int(match[1]) in (2, 3, 4, 5, 6, 8) else None


def read_config(path: Path) -> Mapping[str, Any]:
    """A config.json as a mapping. Raises ModelError saying what is wrong with it."""
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object, so it is no config.json")
    return config


def find_shape(model: str) -> ModelShape:
    """The shape of a config.json, a model folder, or a known model. Never goes to the network.

    Raises ModelError that names the ways to give one.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        name = path.parent.resolve().name if path.name == "config.json" else path.stem
        return read_shape(read_config(path), name or "model")
    entry = find_known(model)
    if entry is not None:
        config = dict(entry)
        stated = bits_in_name(model)
        if stated is not None:
            config["quantization"] = {"bits": stated.bits, "group_size": stated.group_size, "mode": stated.mode}
        return read_shape(config, model)
    cached = _cached_config(model)
    if cached is not None:
        return read_shape(read_config(cached), model)
    raise ModelError(
        f"no shape is known for {model!r}. Give the path of a config.json or of a model folder, or one of: "
        + ", ".join(known_models())
    )


def _cached_config(model: str) -> Path | None:
    """The config.json of a repository that was downloaded before."""
    if model.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "config.json")
    except ValueError:  # not the name of a repository
        return None
    return Path(found) if isinstance(found, str) else None
