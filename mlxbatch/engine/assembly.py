"""Builds the parts of an engine for one model on this machine: weights, runner, memory budget, scheduler."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mlxbatch.capacity.budget import LINUX_SHARE, MemoryBudget, activation_bytes, buffer_cache_bytes
from mlxbatch.capacity.chips import detect_chip
from mlxbatch.capacity.curve_store import CurveStore
from mlxbatch.capacity.machine_memory import physical_memory
from mlxbatch.capacity.model_families import read_shape
from mlxbatch.config import EngineConfig
from mlxbatch.engine.memory_plan import MemoryClaim, Neighbours, PoolRange, kv_budget, pool_range
from mlxbatch.engine.metrics import Targets
from mlxbatch.engine.snapshot import EffCurve, MachineFacts, MemoryUse, ModelFacts
from mlxbatch.engine.tuning import Tuning, machine_key, model_key, tune_for
from mlxbatch.engine.warm_up import warm_up
from mlxbatch.errors import ModelError, UsageError
from mlxbatch.execution.backend import prepare_backend
from mlxbatch.models.loaded import LoadedModel
from mlxbatch.models.progress import Progress, silent
from mlxbatch.scheduling.groups import KVMemory
from mlxbatch.scheduling.plan import StepPlan
from mlxbatch.scheduling.scheduler import Scheduler

prepare_backend()  # before mlx.core: it resolves its BLAS when it is loaded

import mlx.core as mx  # noqa: E402

from mlxbatch.execution.attention.choice import choose_attention  # noqa: E402
from mlxbatch.execution.attention.layout import PagedAttention  # noqa: E402
from mlxbatch.execution.attention.reference import ReferenceAttention  # noqa: E402
from mlxbatch.execution.model_runner import ModelRunner  # noqa: E402
from mlxbatch.execution.modes import Mode  # noqa: E402
from mlxbatch.execution.quantized_linear import use_small_batch_kernels  # noqa: E402
from mlxbatch.models import load  # noqa: E402


@dataclass(slots=True)
class Assembly:
    """The parts, and the facts about them that are shown to users."""

    loaded: LoadedModel
    runner: ModelRunner
    scheduler: Scheduler
    budget: MemoryBudget
    pools: PoolRange
    model_facts: ModelFacts
    machine_facts: MachineFacts
    curve: Callable[[], EffCurve] = EffCurve
    observe: Callable[[StepPlan, float], None] | None = None
    rows_reason: str = ""  # why max_num_seqs is what it is
    targets: Targets = field(default_factory=Targets)
    _peak: int = field(default=0)

    @property
    def claim(self) -> MemoryClaim:
        # The limit, not the budget: memory pressure lowers that for a while only.
        return self.pools.claim(self.budget, self.scheduler.kv.limit)

    def memory_use(self) -> MemoryUse:
        kv = self.runner.kv
        return MemoryUse(
            weights=self.loaded.weight_bytes,
            pool=kv.pool_bytes(kv.num_blocks),
            tails=kv.tail_bytes(kv.num_slots),
            active=int(mx.get_active_memory()),
            peak=kv.peak_bytes,
            buffer_cache=int(mx.get_cache_memory()),
        )

    def stats(self) -> dict[str, object]:
        use = self.memory_use()
        return {
            "model": self.loaded.name,
            "weight_bytes": use.weights,
            "kv_pool_allocated_bytes": use.pool,
            "kv_tail_bytes": use.tails,
            "active_bytes": use.active,
            "peak_bytes": use.peak,
            "attention": self.model_facts.attention,
            "mode": str(self.runner.profile.mode),
            "prefix_caching": self.scheduler.kv.prefix_caching,
            "state_bytes_per_sequence": self.runner.profile.state_bytes,
        }

    def notes(self, config: EngineConfig) -> list[str]:
        """What the engine does not do although the configuration asks for it."""
        if config.prefix_caching and not self.scheduler.kv.prefix_caching:
            return [f"prefix caching is off: {self.loaded.name} has recurrent layers"]
        return []

    def release(self) -> None:
        """Drop what holds memory; the facts stay."""
        del self.runner, self.loaded, self.scheduler


def load_for(config: EngineConfig, progress: Progress = silent) -> LoadedModel:
    """Load the model that a configuration names, fetching it if need be. Raises ModelError."""
    progress(f"loading {config.model}", 0, 0)
    return load(
        config.model,
        revision=config.revision,
        dtype=config.dtype,
        adapter=config.adapter,
        import_bits=config.import_bits,
        progress=progress,
    )


def assemble(
    config: EngineConfig, loaded: LoadedModel, neighbours: Neighbours = lambda claim: 0, *, tuned: bool = True
) -> Assembly:
    """Size everything for this machine. Raises ModelError or UsageError."""
    max_model_len = _max_model_len(config, loaded)
    tuning = _tuning(config, loaded, tuned=tuned)
    config, rows = tuning.config, tuning.rows
    attention = choose_attention(config.attention, measured=not config.deterministic)
    if mx.metal.is_available() and config.attention != "reference" and not config.deterministic:
        use_small_batch_kernels(loaded.model)
    runner = ModelRunner(
        loaded.model,
        block_size=config.block_size,
        attention=attention,
        row_sizes=tuning.row_sizes,
    )
    activations = _activation_bytes(config, loaded, runner, rows, max_model_len)
    budget = _memory_budget(config, loaded, runner, rows, activations)
    pools = pool_range(
        budget,
        KVMemory(runner.groups, config.block_size, 0),
        config.kv_memory,
        rows=rows,
        max_model_len=max_model_len,
    )
    budget = replace(budget, others=neighbours(pools.claim(budget, pools.full)))
    # The zero block and one block of every group, or nothing can run.
    smallest = sum(2 * group.bytes_per_block for group in runner.groups)
    kv = KVMemory(
        runner.groups,
        config.block_size,
        kv_budget(
            budget, smallest, pools.full, requested=config.kv_memory is not None, memory=physical_memory()
        ),
        prefix_caching=config.prefix_caching and runner.profile.mode is Mode.PACKED,
    )
    mx.set_cache_limit(budget.buffer_cache)
    _set_wired_limit(budget)
    scheduler = Scheduler(
        kv,
        max_num_seqs=rows,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        tail_len=runner.tail_len,
        eos_token_ids=loaded.eos_token_ids,
        policy=tuning.policy,
        prefill_budget=tuning.prefill_budget,
        seed=config.seed,
    )
    return Assembly(
        loaded,
        runner,
        scheduler,
        budget,
        pools,
        _model_facts(config, loaded, runner, attention, max_model_len),
        _machine_facts(budget),
        curve=tuning.curve,
        observe=tuning.observe,
        rows_reason=tuning.reason,
        targets=Targets(ttft=config.ttft_target, tpot=config.tpot_target),
    )


def _tuning(config: EngineConfig, loaded: LoadedModel, *, tuned: bool) -> Tuning:
    chip = detect_chip()
    dtype = str(loaded.dtype).removeprefix("mlx.core.")
    key = model_key(loaded.name, loaded.fingerprint, dtype)
    curve = CurveStore().load(key, machine_key(chip)) if tuned else None
    try:
        shape = read_shape(loaded.config, loaded.name)
    except ModelError:
        shape = None
    return tune_for(config, shape=shape, chip=chip, dtype_bytes=loaded.dtype.size, curve=curve)


def _max_model_len(config: EngineConfig, loaded: LoadedModel) -> int:
    if config.max_model_len > loaded.max_model_len:
        raise UsageError(
            f"max_model_len {config.max_model_len} is beyond the {loaded.max_model_len} positions that {loaded.name} "
            "was made for"
        )
    return config.max_model_len or loaded.max_model_len


def working_set_bytes() -> int:
    """What the GPU's driver recommends to use; on Linux a share of the memory."""
    if sys.platform == "darwin" and mx.metal.is_available():
        return int(mx.device_info()["max_recommended_working_set_size"])
    return int(physical_memory() * LINUX_SHARE)


def _activation_bytes(
    config: EngineConfig, loaded: LoadedModel, runner: ModelRunner, rows: int, max_model_len: int
) -> int:
    """What a step takes beside weights and KV memory. Measured where memory is tight, that is on a GPU; estimated
    on Linux, where the warm-up would cost seconds and the memory is the system's own."""
    tokens = config.max_num_batched_tokens
    if mx.metal.is_available():
        return warm_up(runner, rows=rows, max_num_batched_tokens=tokens, max_model_len=max_model_len)
    try:
        return activation_bytes(read_shape(loaded.config, loaded.name), tokens, rows, loaded.dtype.size)
    except ModelError:  # a family whose layers capacity/ does not describe: eight times the widest vectors
        hidden = int(loaded.config.get("hidden_size", 4096))
        width = int(loaded.config.get("intermediate_size", 4 * hidden))
        return 8 * tokens * (hidden + width) * loaded.dtype.size + 2 * rows * runner.profile.vocab_size * 4


def _memory_budget(
    config: EngineConfig, loaded: LoadedModel, runner: ModelRunner, rows: int, activations: int
) -> MemoryBudget:
    slots = 1 << max(0, rows - 1).bit_length()
    return MemoryBudget(
        working_set=working_set_bytes(),
        utilization=config.gpu_memory_utilization,
        weights=loaded.weight_bytes,
        activations=activations,
        tails=2 * runner.kv.tail_bytes(slots),
        pending=config.max_num_batched_tokens * runner.kv.bytes_per_token,
        # Twice: a step stores states into copies of these arrays. One slot more is scratch.
        state=2 * (slots + 1) * runner.profile.state_bytes,
        buffer_cache=buffer_cache_bytes(physical_memory()),
        layers=max(1, len(runner.kv.layers)),
    )


def _set_wired_limit(budget: MemoryBudget) -> None:
    """Keep weights and KV resident: macOS pages out large models otherwise (4.7 against 0.23 tok/s for a 70B)."""
    if sys.platform == "darwin" and mx.metal.is_available():
        mx.set_wired_limit(budget.working_set)


def _model_facts(
    config: EngineConfig, loaded: LoadedModel, runner: ModelRunner, attention: PagedAttention, max_model_len: int
) -> ModelFacts:
    quantization = loaded.config.get("quantization") or {}
    bits, group = quantization.get("bits"), quantization.get("group_size")
    full = [group for group in runner.groups if group.window is None]
    return ModelFacts(
        name=loaded.name,
        source=config.model,
        dtype=str(loaded.dtype).removeprefix("mlx.core."),
        quantization=f"{bits}-bit g{group}" if bits else "",
        layers=len(runner.kv.layers),
        max_model_len=max_model_len,
        weight_bytes=loaded.weight_bytes,
        kv_bytes_per_token=sum(group.bytes_per_block for group in full) // config.block_size,
        kv_dtype=str(loaded.dtype).removeprefix("mlx.core."),
        block_size=config.block_size,
        attention="reference" if isinstance(attention, ReferenceAttention) else "metal",
    )


def _machine_facts(budget: MemoryBudget) -> MachineFacts:
    chip = detect_chip()
    return MachineFacts(
        chip=chip.name if chip is not None else "",
        backend="metal" if mx.metal.is_available() else "cpu",
        memory_bytes=physical_memory(),
        budget_bytes=budget.usable,
        bandwidth=float(chip.bandwidth) if chip is not None else None,
    )
