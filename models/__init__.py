"""Finding, fetching and loading models: catalog names, hub repos, mlx-lm directories, GGUF files.

Cheap to import: mlx is loaded by the first call of `load`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if __name__ != "mlxbatch.models":  # one identity only: never `import models` from the checkout's root
    raise ImportError("import this package as mlxbatch.models")

if TYPE_CHECKING:
    from mlxbatch.config import DType
    from mlxbatch.models.loaded import LoadedModel
    from mlxbatch.models.progress import Progress

__all__ = ["load"]


def load(
    spec: str,
    *,
    revision: str | None = None,
    dtype: DType = "auto",
    adapter: str | None = None,
    import_bits: int = 0,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model by catalog name, hub repo id, mlx-lm directory, or `.gguf` file, fetching it if need be.

    `dtype` "auto" keeps what the model has on macOS and is dequantised float32 on Linux. `import_bits`
    says how the weights of a GGUF file are stored: 16 (the compute dtype), 8 or 4 (MLX affine); 0 keeps the
    file's own size on macOS and is 16 on Linux. Raises ModelError.
    """
    from mlxbatch.models.loader import load_model

    return load_model(
        spec, revision=revision, dtype=dtype, adapter=adapter, import_bits=import_bits, progress=progress
    )
