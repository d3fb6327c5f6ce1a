"""mlxbatch: continuous batching with a paged KV cache for local models on Apple Silicon."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from mlxbatch.llm import LLM
    from mlxbatch.request import CompletionOutput, RequestOutput, SamplingParams


def __getattr__(name: str) -> Any:
    # Lazy: `mlxbatch --help` and the terminal interface must never load mlx.
    if name == "LLM":
        from mlxbatch.execution.backend import prepare_backend
        from mlxbatch.llm import LLM

        prepare_backend()  # now: a script may import mlx.core itself before it makes an LLM

        return LLM
    if name in ("CompletionOutput", "RequestOutput", "SamplingParams"):
        from mlxbatch import request

        return getattr(request, name)
    raise AttributeError(f"module 'mlxbatch' has no attribute {name!r}")
