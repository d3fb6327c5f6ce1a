"""Model families of mlx-lm that mlxbatch refuses, and why. SUPPORT.md, beside this file, lists all families."""

from __future__ import annotations

from mlxbatch.errors import ModelError

# mlx-lm model file -> the reason, which completes "mlxbatch cannot run models of type X: "
REFUSED: dict[str, str] = {
    "deepseek_v41": "its layers keep compressed keys in a cache of their own kind",
    "muse_spark": "its layers are Metal kernels that round to bfloat16, and have not been compared with mlx-lm",
    "olmo": "mlx-lm's own code for it fails on prompts of more than one token",
    "phi3small": "every head of its block-sparse attention sees other keys",
}


def check_supported(family: str) -> None:
    """Raises ModelError for a family that cannot be run, before any of its weights are read."""
    if reason := REFUSED.get(family):
        raise ModelError(f"mlxbatch cannot run models of type {family}: {reason}")
