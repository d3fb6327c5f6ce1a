"""What a model costs, from its shape alone: matrices, KV memory per token, recurrent state, parameters.

`model_families` reads a shape from a config.json; nothing here touches weights or MLX.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["full", "sliding", "latent", "recurrent", "none"]


@dataclass(frozen=True, slots=True)
class Linear:
    """`copies` matrices of [outputs, inputs], each applied to every token. A bias is never quantised."""

    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs * self.copies

    @property
    def params(self) -> int:
        return self.weights + (self.outputs * self.copies if self.bias else 0)


@dataclass(frozen=True, slots=True)
class Experts:
    """`total` experts of equal shape, of which the router picks `active` for each token."""

    total: int
    active: int
    linears: tuple[Linear, ...]  # of one expert

    @property
    def weights_each(self) -> int:
        return sum(linear.weights for linear in self.linears)

    @property
    def params(self) -> int:
        return self.total * sum(linear.params for linear in self.linears)

    def distinct(self, tokens: float) -> float:
        """Experts that `tokens` tokens touch on average, E (1 - (1 - k/E)^B), if all are equally likely.

        Uneven routers touch fewer: the expectation is concave in the experts' probabilities.
        """
        return self.total * (1.0 - (1.0 - self.active / self.total) ** tokens)


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention. `window` w lets position p see (p - w, p]; None sees everything.

    A latent layer stores one compressed vector of `v_dim` and a rotary part of `k_dim - v_dim` a token,
    for which kv_heads is 1; its keys are both parts and its values the first.
    """

    kind: Literal["full", "sliding", "latent"]
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None
    stores_kv: bool = True  # False: reads the K and V of an earlier layer

    @property
    def kv_elements(self) -> int:
        """Elements of K and V stored for one token."""
        if not self.stores_kv:
            return 0
        return self.k_dim if self.kind == "latent" else self.kv_heads * (self.k_dim + self.v_dim)

    @property
    def flops_per_pair(self) -> int:
        """Multiply-adds counted as two, of one query token with one cached token, all heads."""
        return 2 * self.heads * (self.k_dim + self.v_dim)

    def visible(self, context: float) -> float:
        """Cached tokens that a query at position `context` reads."""
        return context if self.window is None else min(context, float(self.window))


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. `other` counts parameters outside matrices: norms, biases of convolutions, sinks.

    Recurrent state: `state` elements in the activations' dtype and `state_float32` in float32, a sequence.
    """

    attention: Attention | None
    linears: tuple[Linear, ...]
    experts: Experts | None = None
    other: int = 0
    state: int = 0
    state_float32: int = 0

    @property
    def kind(self) -> LayerKind:
        if self.attention is not None:
            return self.attention.kind
        return "recurrent" if self.state or self.state_float32 else "none"

    @property
    def params(self) -> int:
        return sum(m.params for m in self.linears) + self.other + (self.experts.params if self.experts else 0)


@dataclass(frozen=True, slots=True)
class Quantization:
    """MLX's affine quantisation: each group of a row shares a scale and a bias of the activations' dtype.

    mxfp4 has one byte of scale a group of 32 and no bias.
    """

    bits: int
    group_size: int = 64
    mode: str = "affine"

    @property
    def bits_per_weight(self) -> float:
        overhead = 8 if self.mode.startswith("mx") else 32
        return self.bits + overhead / self.group_size


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A whole model. `quantization` is how its weights are stored (None: 16-bit or float32)."""

    name: str
    model_type: str
    hidden: int
    vocab: int
    tied: bool
    layers: tuple[Layer, ...]
    other: int  # final norm and the like
    max_context: int
    quantization: Quantization | None = None
    approximate: bool = False  # the family is not known: read as if it were llama

    @property
    def embedding(self) -> Linear:
        return Linear(self.hidden, self.vocab)

    @property
    def params(self) -> int:
        tables = self.embedding.params * (1 if self.tied else 2)
        return tables + sum(layer.params for layer in self.layers) + self.other

    @property
    def active_params(self) -> int:
        """Parameters that one token is multiplied with, the output head included and the input table not."""
        idle = sum(
            (layer.experts.total - layer.experts.active) * layer.experts.params // layer.experts.total
            for layer in self.layers
            if layer.experts is not None
        )
        return self.params - idle - (0 if self.tied else self.embedding.params)

    @property
    def matrix_weights(self) -> int:
        """Weights in matrices: what quantisation applies to."""
        return self.embedding.weights * (1 if self.tied else 2) + sum(
            sum(m.weights for m in layer.linears)
            + (layer.experts.total * layer.experts.weights_each if layer.experts else 0)
            for layer in self.layers
        )

    @property
    def is_moe(self) -> bool:
        return any(layer.experts is not None for layer in self.layers)

    @property
    def experts(self) -> Experts | None:
        """The experts of the first layer that has any."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)

    def attention_layers(self) -> Iterator[Attention]:
        return (layer.attention for layer in self.layers if layer.attention is not None)

    def count(self, kind: LayerKind) -> int:
        return sum(layer.kind == kind for layer in self.layers)

    def weight_bytes(self, quantization: Quantization | None, dtype_bytes: int = 2) -> int:
        """Bytes of all weights, matrices quantised and the rest in the activations' dtype."""
        if quantization is None:
            return self.params * dtype_bytes
        matrices = self.matrix_weights
        return round(matrices * quantization.bits_per_weight / 8) + (self.params - matrices) * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """K and V of one token in every layer that stores them, windows ignored."""
        return sum(a.kv_elements for a in self.attention_layers()) * dtype_bytes

    def state_bytes(self, dtype_bytes: int = 2) -> int:
        """Recurrent state of one sequence."""
        return sum(layer.state * dtype_bytes + layer.state_float32 * 4 for layer in self.layers)
