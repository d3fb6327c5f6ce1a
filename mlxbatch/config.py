"""Engine settings as one validated value. Where they come from (flags, MLXBATCH_*, config.toml) is settings.py."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from mlxbatch.errors import UsageError

DType = Literal["auto", "float32", "float16", "bfloat16"]
AttentionChoice = Literal["auto", "reference", "metal"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that shapes one engine. `max_num_seqs` 0 means auto: measured curve or chip table.

    `kv_memory` is bytes for KV blocks and overrides `gpu_memory_utilization`. `max_model_len` 0 means the
    model's own. Raises UsageError when limits contradict each other.
    """

    model: str = "smollm2-135m"
    revision: str | None = None
    adapter: str | None = None
    dtype: DType = "auto"
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 512
    max_model_len: int = 0
    block_size: int = 16
    kv_memory: int | None = None
    gpu_memory_utilization: float = 0.90
    prefix_caching: bool = True
    attention: AttentionChoice = "auto"
    policy: Literal["fcfs", "shortest", "priority"] = "fcfs"
    mode: Literal["balanced", "interactive", "throughput"] = "balanced"
    tpot_target: float | None = None  # seconds
    ttft_target: float | None = None  # seconds
    seed: int = 0
    deterministic: bool = False
    import_bits: int = 0  # how GGUF weights are stored: 16 (the compute dtype), 8 or 4; 0 suits the machine
    chat_template_args: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.block_size not in (4, 8, 16, 32):  # 4 exists for tests
            raise UsageError(f"block size must be 8, 16 or 32, not {self.block_size}")
        if self.max_num_seqs < 0 or self.max_num_seqs > 256:
            raise UsageError(f"max_num_seqs must be 1 to 256 (or auto), not {self.max_num_seqs}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise UsageError(
                f"gpu_memory_utilization must be above 0 and at most 1, not {self.gpu_memory_utilization}"
            )
        rows = max(1, self.max_num_seqs)
        if self.max_num_batched_tokens < rows + self.block_size:
            raise UsageError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs + block_size "
                f"({rows} + {self.block_size} = {rows + self.block_size}), so that prefill moves on beside a full "
                "batch of decodes"
            )
        if self.max_model_len < 0:
            raise UsageError(f"max_model_len must be at least 1 (or 0: the model's own), not {self.max_model_len}")
        if self.kv_memory is not None and self.kv_memory <= 0:
            raise UsageError("kv_memory must be a positive number of bytes")

    def as_dict(self) -> dict[str, object]:
        return asdict(self)
