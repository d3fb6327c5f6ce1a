"""Reading config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlxbatch.errors import ModelError

_MAX_JSON = 1 << 26


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises ModelError that says what is wrong with it."""
    path = folder / "config.json"
    try:
        if path.stat().st_size > _MAX_JSON:
            raise ModelError(f"{path} is larger than any configuration")
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{folder} holds no config.json, so it is not a model directory (give a GGUF file by its own path)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error or type(error).__name__}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object")
    return config
