"""Loading a model: what the user asked for to an mlx-lm module in memory."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxbatch.config import DType
from mlxbatch.errors import ModelError
from mlxbatch.models.adapters import adapt
from mlxbatch.models.directory_model import read_directory_model
from mlxbatch.models.gguf_model import read_gguf_model
from mlxbatch.models.loaded import LoadedModel
from mlxbatch.models.lora import apply_adapter
from mlxbatch.models.progress import Progress, silent
from mlxbatch.models.source import fingerprint, resolve, resolve_adapter
from mlxbatch.models.weights import activation_dtype

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_IMPORT_BITS = (0, 4, 8, 16)
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
_UNKNOWN_CONTEXT = 32768  # for recurrent models, whose configuration names no limit


def load_model(
    spec: str,
    *,
    revision: str | None = None,
    dtype: DType = "auto",
    adapter: str | None = None,
    import_bits: int = 0,
    progress: Progress | None = None,
) -> LoadedModel:
    """See `mlxbatch.models.load`."""
    if import_bits not in _IMPORT_BITS:
        raise ModelError(f"import bits must be 4, 8 or 16, or 0 for what suits the machine, not {import_bits}")
    report = progress or silent
    local = resolve(spec, revision=revision, progress=report)
    wanted = _wanted_dtype(dtype)
    if local.kind == "gguf":
        parts = read_gguf_model(local.path, wanted, import_bits, report)
    else:
        parts = read_directory_model(local.path, wanted)
    files = list(parts.files)
    if adapter is not None:
        files += apply_adapter(parts.model, resolve_adapter(adapter, report), wanted)
    adapt(parts.model)
    parts.model.eval()
    mx.eval(parts.model.parameters())
    return LoadedModel(
        name=local.name,
        model=parts.model,
        tokenizer=parts.tokenizer,
        config=parts.config,
        max_model_len=context_length(parts.config),
        eos_token_ids=parts.tokenizer.eos_token_ids,
        weight_bytes=sum(array.nbytes for _, array in tree_flatten(parts.model.parameters())),
        dtype=activation_dtype(parts.model),
        fingerprint=fingerprint(files),
    )


def _wanted_dtype(dtype: DType) -> mx.Dtype | None:
    """The dtype to convert to; None keeps what the model has."""
    if dtype == "auto":
        # Half precision and quantised matmuls bypass BLAS on the CPU backend and are slow there.
        return None if sys.platform == "darwin" else mx.float32
    return _DTYPES[dtype]


def context_length(config: dict[str, Any]) -> int:
    """The longest sequence that the configuration allows, in tokens."""
    text = config.get("text_config")
    for part in (text if isinstance(text, dict) else {}, config):
        for key in _CONTEXT_KEYS:
            if isinstance(value := part.get(key), int) and value > 0:
                return value
    return _UNKNOWN_CONTEXT
