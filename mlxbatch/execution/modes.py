"""How a model can be run, found by calling it once without computing anything.

PACKED: all tokens of a step in one [T, 1] forward pass; models whose caches are all attention caches.
SEGMENTED: one [R, 1] pass for decode rows and one [1, n] pass for each chunk; models with recurrent layers.

MLX builds graphs lazily, so a forward pass over probes that is never evaluated tells, at no cost, which
shapes each layer stores, which windows it uses, and whether the model lets the attention hook in at all.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from mlxbatch.errors import ModelError
from mlxbatch.execution.attention.gathered import RowContext
from mlxbatch.execution.attention.hook import KVMarker, install_hook
from mlxbatch.execution.cache import MaskMarker
from mlxbatch.execution.kv_layer import LayerShape
from mlxbatch.execution.latent import attend_token_by_token, is_latent_attention
from mlxbatch.scheduling.plan import GroupSpec

_PROBE_ROWS = 3
_LONG = 1 << 30  # as many positions as make any adapter attend by itself


class Mode(enum.StrEnum):
    PACKED = "packed"
    SEGMENTED = "segmented"


@dataclass(frozen=True, slots=True)
class AttentionEntry:
    """A cache of keys and values. `layer` indexes the KV layers; None if the model never uses it.

    `window` is that of mlx-lm's own cache; a mask with a window goes before it.
    """

    layer: int | None
    window: int | None
    latent: bool


@dataclass(frozen=True, slots=True)
class RecurrentEntry:
    """A cache of recurrent state. `state` indexes the recurrent layers."""

    state: int


# The model's list of caches; a tuple stands for mlx-lm's CacheList.
CacheEntry = AttentionEntry | RecurrentEntry | tuple["CacheEntry", ...]


@dataclass(frozen=True, slots=True)
class StateShape:
    """One recurrent state array of one sequence, batch axis left out."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        count = int(self.dtype.size)
        for dim in self.shape:
            count *= dim
        return count


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """What the runner needs to know of a model. `states[i]` are the arrays of recurrent layer i; None stands
    for one that the model does not use."""

    mode: Mode
    entries: tuple[CacheEntry, ...]
    shapes: tuple[LayerShape, ...]
    groups: tuple[GroupSpec, ...]
    states: tuple[tuple[StateShape | None, ...], ...]
    vocab_size: int

    def attention_entries(self) -> list[AttentionEntry]:
        """All attention entries, those inside CacheLists included."""
        found: list[AttentionEntry] = []
        left = list(reversed(self.entries))
        while left:
            entry = left.pop()
            if isinstance(entry, tuple):
                left.extend(reversed(entry))
            elif isinstance(entry, AttentionEntry):
                found.append(entry)
        return found

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one sequence."""
        return sum(array.nbytes for layer in self.states for array in layer if array is not None)


def profile_model(model: nn.Module, block_size: int) -> ModelProfile:
    """Find out how to run `model`. Raises ModelError, naming the model and the reason, if it cannot be."""
    name = str(getattr(model, "model_type", "") or type(model).__module__.rpartition(".")[2])
    install_hook()
    stock = make_prompt_cache(model)
    latent = _latent_layers(model, len(stock))
    probes = [_probe(cache, flag, name) for cache, flag in zip(stock, latent, strict=True)]
    flat = list(_leaves(probes))
    recurrent = [probe for probe in flat if isinstance(probe, ArraysCache)]
    mode = Mode.SEGMENTED if recurrent else Mode.PACKED
    try:
        logits = model(mx.zeros((_PROBE_ROWS, 1), mx.int32), cache=probes)
    except ModelError as error:
        raise ModelError(f"mlxbatch cannot run models of type {name}: {error}") from None
    except Exception as error:
        raise ModelError(
            f"mlxbatch cannot run models of type {name}: it uses its cache in a way that paged attention does "
            f"not cover ({type(error).__name__}: {error})"
        ) from error
    if tuple(logits.shape[:2]) != (_PROBE_ROWS, 1):
        raise ModelError(f"mlxbatch cannot run models of type {name}: its positions are not per row")
    attention = [probe for probe in flat if isinstance(probe, _ProbeCache) and probe.shape is not None]
    if any(not probe.attended for probe in attention):
        raise ModelError(f"mlxbatch cannot run models of type {name}: it computes attention by hand")
    if mode is Mode.SEGMENTED and any(probe.latent for probe in attention):
        attend_token_by_token(model)
    return ModelProfile(
        mode=mode,
        entries=tuple(_entry(probe, attention, recurrent) for probe in probes),
        shapes=tuple(probe.shape for probe in attention if probe.shape is not None),
        groups=_groups(attention, block_size),
        states=tuple(_state_shapes(probe) for probe in recurrent),
        vocab_size=int(logits.shape[-1]),
    )


class _ProbeCache:
    """Records what a model does with one attention cache."""

    def __init__(self, window: int | None, latent: bool) -> None:
        self.window = window
        self.latent = latent
        self.shape: LayerShape | None = None
        self.windows: set[int | None] = set()
        self.offset = mx.arange(_PROBE_ROWS)
        self._fresh: tuple[mx.array, mx.array] | None = None

    @property
    def attended(self) -> bool:
        return bool(self.windows)

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> MaskMarker | None:
        if self.latent and not window_size:
            return None
        return MaskMarker(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        if keys.shape[:1] != (_PROBE_ROWS,) or keys.shape[1:3] != values.shape[1:3] or keys.shape[2] != 1:
            raise ModelError(f"keys {keys.shape} and values {values.shape} are not one per row")
        self.shape = LayerShape(
            int(keys.shape[1]), int(keys.shape[3]), int(values.shape[3]), keys.dtype, values.dtype
        )
        self._fresh = (keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        if self._fresh is None:
            raise ModelError("a layer asks for keys and values of a layer that has not run yet")
        keys, values = self._fresh
        if self.latent:
            return KVMarker(self, keys), mx.eye(values.shape[3], dtype=values.dtype)[None, None]
        return KVMarker(self, keys), KVMarker(self, values)

    @property
    def longest(self) -> int:
        return _LONG

    def contexts(self) -> Iterator[RowContext]:
        if self._fresh is None:
            raise ModelError("a layer attends before it has stored its keys")
        self.windows.add(self.window)
        keys, values = self._fresh
        for row in range(_PROBE_ROWS):
            yield RowContext(row, row + 1, 0, 0, keys[row : row + 1], values[row : row + 1])

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        if self.latent != isinstance(mask, mx.array):
            raise ModelError(f"its attention mask is {type(mask).__name__}")
        self.windows.add((mask.window if isinstance(mask, MaskMarker) else None) or self.window)
        if self._fresh is None:
            raise ModelError("a layer attends before it has stored its keys")
        width = self._fresh[0 if self.latent else 1].shape[3]
        return mx.zeros((*queries.shape[:3], width), queries.dtype)


def _latent_layers(model: nn.Module, count: int) -> list[bool]:
    """Which layers attend in the absorbed latent form."""

    def is_latent(module: nn.Module) -> bool:
        return any(is_latent_attention(part) for _, part in module.named_modules())

    layers = list(getattr(model, "layers", []))
    if len(layers) != count:
        return [is_latent(model)] * count
    return [is_latent(layer) for layer in layers]


def _probe(cache: Any, latent: bool, name: str) -> Any:
    if type(cache) is KVCache:
        return _ProbeCache(None, latent)
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return _ProbeCache(int(cache.max_size), latent)
    if type(cache) is ChunkedKVCache:  # no position sees further back than a chunk
        return _ProbeCache(int(cache.chunk_size), latent)
    if type(cache) is ArraysCache:
        return ArraysCache(len(cache.cache))
    if type(cache) is CacheList:
        return CacheList(*(_probe(part, latent, name) for part in cache.caches))
    raise ModelError(f"mlxbatch cannot run models of type {name}: its cache is a {type(cache).__name__}")


def _leaves(probes: Sequence[Any]) -> Any:
    for probe in probes:
        if isinstance(probe, CacheList):
            yield from _leaves(probe.caches)
        else:
            yield probe


def _entry(probe: Any, attention: list[_ProbeCache], recurrent: list[Any]) -> CacheEntry:
    if isinstance(probe, CacheList):
        return tuple(_entry(part, attention, recurrent) for part in probe.caches)
    if isinstance(probe, _ProbeCache):
        layer = attention.index(probe) if probe.shape is not None else None
        return AttentionEntry(layer, probe.window, probe.latent)
    return RecurrentEntry(next(i for i, other in enumerate(recurrent) if other is probe))


def _groups(attention: Sequence[_ProbeCache], block_size: int) -> tuple[GroupSpec, ...]:
    """Layers by kind: latent, full attention, each window; in order of first appearance."""
    kinds: dict[tuple[bool, int | None], list[int]] = {}
    for index, probe in enumerate(attention):
        widest = None if None in probe.windows else max(w for w in probe.windows if w is not None)
        kinds.setdefault((probe.latent, widest), []).append(index)
    return tuple(
        GroupSpec(
            name="latent" if latent else "full" if window is None else f"window-{window}",
            layers=tuple(layers),
            window=window,
            bytes_per_block=block_size
            * sum(shape.bytes_per_token for i in layers if (shape := attention[i].shape) is not None),
        )
        for (latent, window), layers in kinds.items()
    )


def _state_shapes(probe: Any) -> tuple[StateShape | None, ...]:
    return tuple(
        None if array is None else StateShape(tuple(array.shape[1:]), array.dtype) for array in probe.cache
    )
