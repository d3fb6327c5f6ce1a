"""Runs prompts through a LocalEngine around a model that is loaded already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlxbatch.config import EngineConfig
from mlxbatch.engine.local import LocalEngine
from mlxbatch.request import Request, SamplingParams

if TYPE_CHECKING:
    from mlxbatch.models.loaded import LoadedModel


def run_engine(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    **settings: Any,
) -> tuple[list[list[int]], dict[str, object]]:
    """Output tokens of output 0 for each prompt, and the engine's statistics."""
    engine = LocalEngine(EngineConfig(model=loaded.name, **settings), loaded=loaded)
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    for number, (prompt, one) in enumerate(zip(prompts, many, strict=True)):
        engine.submit(Request(str(number), tuple(prompt), one))
    outputs: list[list[int]] = [[] for _ in prompts]
    while engine.has_unfinished:
        for delta in engine.poll():
            if delta.index == 0:
                outputs[int(delta.request_id)] += delta.token_ids
        engine.core.scheduler.check()
    stats = engine.stats()
    engine.close()
    return outputs, stats


def small_pool(loaded: LoadedModel, prompts: Sequence[Sequence[int]], new_tokens: int, **settings: Any) -> int:
    """Bytes of KV memory that let all prompts start but not all of them grow: some rows get preempted when
    `new_tokens` is well above the block size. Never less than the longest sequence needs alone."""
    engine = LocalEngine(EngineConfig(model=loaded.name, **settings), loaded=loaded)
    per_block = sum(group.bytes_per_block for group in engine.core.scheduler.kv.specs)
    engine.close()
    size = int(settings["block_size"])
    alone = (max(map(len, prompts)) + new_tokens) // size
    blocks = [tuple(prompt[:end]) for prompt in prompts for end in range(size, len(prompt) + 1, size)]
    start = len(set(blocks) if settings.get("prefix_caching", True) else blocks) + len(prompts)
    return (max(alone, start) + 2) * per_block
