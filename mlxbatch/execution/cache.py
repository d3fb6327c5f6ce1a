"""The cache objects that mlx-lm's models are called with: one for each layer and forward pass.

They never define `__len__` or `bits`, which mlx-lm tests for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlxbatch.errors import ModelError
from mlxbatch.execution.attention.gathered import RowContext, chunk_row, decode_row
from mlxbatch.execution.attention.hook import KVMarker
from mlxbatch.execution.attention.layout import AttentionSpec, ChunkLayout, DecodeLayout, LayerKV, PagedAttention
from mlxbatch.execution.kv_layer import KVLayer, PendingWrite, TailWrite


class MaskMarker:
    """The mask of a layer kind: causal, within `window` if that is set. The hook applies it."""

    __slots__ = ("window",)

    def __init__(self, window: int | None) -> None:
        self.window = window


@dataclass(frozen=True, slots=True, eq=False)
class ChunkSpan:
    """Flat tokens [begin, end) of a forward pass are one chunk; `layouts` has one entry for each KV group."""

    begin: int
    end: int
    layouts: tuple[ChunkLayout, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ForwardInputs:
    """What the layers of one forward pass read. `offset` [rows] int32 holds the first position of each row of
    the model's input; `decode` and `pending` have one entry for each KV group, `decode` none without rows.

    Flat: the input is [T, 1], decode rows first. Not flat: it is [1, n], one chunk. `slots` int32 are those of
    the decode rows, or of the one chunk.
    """

    token_ids: mx.array
    offset: mx.array
    flat: bool
    num_decode: int
    slots: mx.array
    decode: tuple[DecodeLayout, ...]
    chunks: tuple[ChunkSpan, ...]
    write: TailWrite | None
    pending: tuple[PendingWrite | None, ...]


class CompositeCache:
    """Several caches of one layer, as mlx-lm's CacheList."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self.caches = tuple(caches)

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]


class IdleCache:
    """A cache that the model asks for positions and masks but never fills."""

    def __init__(self, inputs: ForwardInputs) -> None:
        self._inputs = inputs

    @property
    def offset(self) -> mx.array:
        return self._inputs.offset

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> MaskMarker:
        return MaskMarker(window_size)


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """What a layer's write took and left: fresh keys and values, the KV arrays before and after."""

    keys: mx.array
    values: mx.array
    before: LayerKV
    after: LayerKV


class LayerCache:
    """One layer's keys and values during one forward pass.

    `update_and_fetch` does every write, once; `attend` only reads. Decode rows see the tails after the write,
    chunks the tails before it. Layers that share K and V call `attend` several times.
    """

    def __init__(
        self,
        layer: KVLayer,
        group: int,
        window: int | None,
        inputs: ForwardInputs,
        attention: PagedAttention,
    ) -> None:
        self._layer = layer
        self._group = group
        self._window = window
        self._inputs = inputs
        self._attention = attention
        self._written: _Written | None = None

    @property
    def offset(self) -> mx.array:
        return self._inputs.offset

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> MaskMarker | None:
        return MaskMarker(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """keys [T, Hk, 1, D] (or [1, Hk, n, D]), values likewise. Returns what the model gives to attention."""
        inputs = self._inputs
        before = self._layer.kv
        self._layer.write(_tokens(keys), _tokens(values), inputs.write, inputs.pending[self._group])
        self._written = _Written(keys, values, before, self._layer.kv)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Markers; layers that share this layer's keys and values ask for them."""
        written = self._kv()
        return KVMarker(self, written.keys), KVMarker(self, written.values)

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """queries [T, Hq, 1, D] (or [1, Hq, n, D]) -> [T, Hq, 1, Dv] (or [1, Hq, n, Dv])."""
        if mask is not None and not isinstance(mask, MaskMarker):
            raise ModelError(f"the model changed its attention mask to {type(mask).__name__}")
        spec = AttentionSpec(scale, mask.window if mask is not None and mask.window else self._window, softcap)
        attention, kv = self._attention, self._kv()
        return self._by_segments(
            (queries,),
            lambda q, layout: attention.decode(q, kv.after, layout, spec, sinks),
            lambda q, k, v, layout: attention.prefill(q, k, v, kv.before, layout, spec, sinks),
        )

    @property
    def longest(self) -> int:
        """Positions of the longest row of this pass, its own tokens included."""
        inputs, group = self._inputs, self._group
        lengths = inputs.decode[group].host_lengths if inputs.num_decode else ()
        chunks = (chunk.layouts[group] for chunk in inputs.chunks)
        return max([*lengths, *(layout.start + layout.num_tokens for layout in chunks)])

    def contexts(self) -> Iterator[RowContext]:
        """Every row's keys and values, decode rows first, for adapters that attend by themselves in flat passes."""
        inputs, group, kv = self._inputs, self._group, self._kv()
        for row in range(inputs.num_decode):
            yield decode_row(kv.after, inputs.decode[group], row)
        for chunk in inputs.chunks:
            keys, values = (
                array[chunk.begin : chunk.end].transpose(2, 1, 0, 3) for array in (kv.keys, kv.values)
            )
            yield chunk_row(kv.before, chunk.layouts[group], chunk.begin, keys, values)

    def _kv(self) -> _Written:
        if self._written is None:
            raise ModelError("a layer asks for keys and values of a layer that has not run yet")
        return self._written

    def _by_segments(
        self,
        queries: tuple[mx.array, ...],
        decode: Callable[..., mx.array],
        prefill: Callable[..., mx.array],
    ) -> mx.array:
        """`decode(*queries, layout)` for the decode rows, `prefill(*queries, k, v, layout)` for each chunk."""
        inputs, group, kv = self._inputs, self._group, self._kv()
        if not inputs.flat:
            return prefill(*queries, kv.keys, kv.values, inputs.chunks[0].layouts[group])
        rows = inputs.num_decode
        parts = []
        if rows:
            own = queries if not inputs.chunks else tuple(q[:rows] for q in queries)
            parts.append(decode(*own, inputs.decode[group]))
        for chunk in inputs.chunks:
            own = tuple(
                array[chunk.begin : chunk.end].transpose(2, 1, 0, 3) for array in (*queries, kv.keys, kv.values)
            )
            parts.append(prefill(*own, chunk.layouts[group]).transpose(2, 1, 0, 3))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)


class LatentLayerCache(LayerCache):
    """A layer of multi-head latent attention in its absorbed form.

    The model multiplies the rotary queries with the rotary keys itself and hands the scores to attention as
    the mask. Given the identity in place of the keys, it hands over the scaled rotary queries instead.
    """

    def __init__(
        self,
        layer: KVLayer,
        group: int,
        inputs: ForwardInputs,
        attention: PagedAttention,
        identity: mx.array,
    ) -> None:
        super().__init__(layer, group, None, inputs, attention)
        self._identity = identity

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> None:
        if window_size:
            raise ModelError("latent attention within a sliding window is not supported")

    def by_token(self) -> LatentLayerCache:
        """The same layer for attention modules that are given a chunk as [n, 1] in place of [1, n]."""
        inputs = self._inputs
        rows = replace(inputs, flat=True, offset=inputs.offset + mx.arange(inputs.chunks[0].end))
        return LatentLayerCache(self._layer, self._group, rows, self._attention, self._identity)

    def keys_and_values(self) -> tuple[Any, Any]:
        return KVMarker(self, self._kv().keys), self._identity

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """queries [T, Hq, 1, 512], mask: rotary queries [T, Hq, 1, 64] times scale -> [T, Hq, 1, 512]."""
        if not isinstance(mask, mx.array) or sinks is not None or softcap is not None:
            raise ModelError("latent attention was called in a form that mlxbatch does not know")
        spec, attention, kv = AttentionSpec(scale), self._attention, self._kv()
        return self._by_segments(
            (queries, mask),
            lambda q, rope, layout: attention.decode_latent(q, rope, kv.after, layout, spec),
            lambda q, rope, k, v, layout: attention.prefill_latent(q, rope, k, v, kv.before, layout, spec),
        )


def _tokens(array: mx.array) -> mx.array:
    """[T, H, 1, D] as it is, or [1, H, n, D] -> [n, H, D]: tokens first."""
    return array if array.shape[2] == 1 else array[0].swapaxes(0, 1)
