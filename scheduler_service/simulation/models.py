"""Language models as the simulation sees them: the weight matrices of each kind of layer.

Parameters, floating-point work, operator times and memory all follow from the one list of matrices, so they cannot
disagree. Norms, biases, rotary tables and multi-token prediction are left out: together less than 0.2 % of a model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import NamedTuple

from scheduler_service.domain import InvalidInputError, Reason


class Part(StrEnum):
    """The part of a layer that a matrix belongs to; what may run at the same time depends on it."""

    QUERY = "query"
    KEY_VALUE = "key and value"
    GATE = "gate"
    OUTPUT = "output"
    ROUTER = "router"
    FFN = "feed-forward"
    """A dense feed-forward network, or the experts that every token passes."""
    EXPERT = "expert"
    HEAD = "head"


class Matrix(NamedTuple):
    """A weight matrix that every token of its part is multiplied with."""

    part: Part
    inner: int
    """Numbers that come in with each token."""
    columns: int
    """Numbers that go out with each token."""
    split: bool = True
    """Whether tensor parallelism cuts it; else every TP rank multiplies the whole of it with its share of tokens."""

    @property
    def parameters(self) -> int:
        """Weights, which are also the multiply-adds of a token."""
        return self.inner * self.columns


@dataclass(frozen=True)
class GroupedQuery:
    """Attention in which groups of query heads share a key and a value head."""

    heads: int
    kv_heads: int
    head_dim: int
    gated: bool = False
    """Whether a gate computed from the layer's input multiplies the output."""

    def __post_init__(self) -> None:
        _require_counts(self, "attention")

    @property
    def d_qk(self) -> int:
        """Width of a query and of a key head."""
        return self.head_dim

    @property
    def d_v(self) -> int:
        """Width of a value head."""
        return self.head_dim

    @property
    def latent_width(self) -> int | None:
        """Numbers per token from which keys and values can be made again: they are the smallest themselves."""
        return None

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """Projections of one layer."""
        width = self.heads * self.head_dim
        return (
            Matrix(Part.QUERY, hidden, width),
            Matrix(Part.KEY_VALUE, hidden, 2 * self.kv_heads * self.head_dim),
            *((Matrix(Part.GATE, hidden, width),) if self.gated else ()),
            Matrix(Part.OUTPUT, width, hidden),
        )


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: queries, keys and values are projected through a narrow latent."""

    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    """Width of the part of a query or key head without rotary positions."""
    rope: int
    """Width of the part with them; the key's is shared by all heads."""
    v: int
    gated: bool = False
    """Whether a gate computed from the layer's input multiplies the output."""

    def __post_init__(self) -> None:
        _require_counts(self, "attention", may_be_zero="rope")

    @property
    def kv_heads(self) -> int:
        """Key and value heads, once they are made: one for each query head."""
        return self.heads

    @property
    def d_qk(self) -> int:
        """Width of a query and of a key head."""
        return self.nope + self.rope

    @property
    def d_v(self) -> int:
        """Width of a value head."""
        return self.v

    @property
    def latent_width(self) -> int | None:
        """Numbers per token from which keys and values can be made again."""
        return self.kv_lora + self.rope

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """Projections of one layer. Those into the latents are not split: they are narrow, and every head needs all."""
        return (
            Matrix(Part.QUERY, hidden, self.q_lora, split=False),
            Matrix(Part.QUERY, self.q_lora, self.heads * self.d_qk),
            Matrix(Part.KEY_VALUE, hidden, self.kv_lora + self.rope, split=False),
            Matrix(Part.KEY_VALUE, self.kv_lora, self.heads * (self.nope + self.v)),
            *((Matrix(Part.GATE, hidden, self.heads * self.v),) if self.gated else ()),
            Matrix(Part.OUTPUT, self.heads * self.v, hidden),
        )


Attention = GroupedQuery | Latent


@dataclass(frozen=True)
class Experts:
    """The feed-forward part of a mixture-of-experts layer."""

    count: int
    """Experts that tokens are routed to."""
    top_k: int
    """How many of them each token visits."""
    width: int
    """Inner width of one expert."""
    shared: int = 0
    """Experts of the same width that every token passes."""

    def __post_init__(self) -> None:
        _require_counts(self, "experts", may_be_zero="shared")
        if self.top_k > self.count:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT, f"experts: top_k is {self.top_k}; give at most {self.count}, their count"
            )


@dataclass(frozen=True)
class Model:
    """A decoder-only language model. Raises `InvalidInputError` that names the field, its value and what it may be."""

    name: str
    layers: int
    hidden: int
    vocabulary: int
    attention: Attention
    dense_layers: int
    """Layers with a dense feed-forward network; they come first. The others have experts."""
    dense_width: int = 0
    """Inner width of the dense feed-forward network."""
    experts: Experts | None = None
    gated_ffn: bool = True
    """Three matrices in a feed-forward network (gate, up, down) instead of two."""
    tied_embedding: bool = False
    """Whether input embedding and output head are one matrix."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "vocabulary"):
            if getattr(self, name) < 1:
                raise self._invalid(f"{name} is {getattr(self, name)}; give a whole number, 1 or more")
        if not 0 <= self.dense_layers <= self.layers:
            raise self._invalid(f"dense_layers is {self.dense_layers}; give 0 to {self.layers}, the number of layers")
        if self.dense_layers and self.dense_width < 1:
            raise self._invalid(
                f"{self.dense_layers} dense layers have dense_width {self.dense_width}; give their width"
            )
        if self.dense_layers < self.layers and self.experts is None:
            raise self._invalid(
                f"{self.layers - self.dense_layers} of {self.layers} layers have no feed-forward network; "
                "give experts, or as many dense_layers as layers"
            )

    def _invalid(self, message: str) -> InvalidInputError:
        return InvalidInputError(Reason.INVALID_ARGUMENT, f"model {self.name}: {message}")

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers

    @property
    def attention_matrices(self) -> tuple[Matrix, ...]:
        """Projections of any layer's attention."""
        return self.attention.matrices(self.hidden)

    @property
    def latent_matrices(self) -> tuple[Matrix, ...]:
        """Of these, those from latents to queries, keys and values; none where there are no latents."""
        ups = (Part.QUERY, Part.KEY_VALUE)
        return tuple(m for m in self.attention_matrices if m.part in ups and m.inner != self.hidden)

    @property
    def dense_matrices(self) -> tuple[Matrix, ...]:
        """Feed-forward matrices of a dense layer."""
        return self._ffn(Part.FFN, self.dense_width) if self.dense_layers else ()

    @property
    def router_matrices(self) -> tuple[Matrix, ...]:
        """What chooses the experts; with sequence parallelism, each TP rank routes its share of the tokens."""
        return (Matrix(Part.ROUTER, self.hidden, self.experts.count, split=False),) if self.experts else ()

    @property
    def shared_matrices(self) -> tuple[Matrix, ...]:
        """Matrices of the experts that every token of a mixture-of-experts layer passes."""
        if self.experts is None or not self.experts.shared:
            return ()
        return self._ffn(Part.FFN, self.experts.width * self.experts.shared)

    @property
    def expert_matrices(self) -> tuple[Matrix, ...]:
        """Matrices of one expert that tokens are routed to."""
        return self._ffn(Part.EXPERT, self.experts.width) if self.experts else ()

    @property
    def head_matrix(self) -> Matrix:
        """From the last layer to the vocabulary."""
        return Matrix(Part.HEAD, self.hidden, self.vocabulary)

    def _ffn(self, part: Part, width: int) -> tuple[Matrix, ...]:
        ways_in = 2 if self.gated_ffn else 1
        return Matrix(part, self.hidden, ways_in * width), Matrix(part, width, self.hidden)

    @property
    def parameters(self) -> int:
        """All weights, input embedding and head included."""
        return self._parameters(self.experts.count if self.experts else 0)

    @property
    def active_parameters(self) -> int:
        """Weights that one token meets, input embedding and head included."""
        return self._parameters(self.experts.top_k if self.experts else 0)

    def _parameters(self, experts: int) -> int:
        moe = weights(self.router_matrices + self.shared_matrices) + experts * weights(self.expert_matrices)
        return (
            self.layers * weights(self.attention_matrices)
            + self.dense_layers * weights(self.dense_matrices)
            + self.moe_layers * moe
            + (1 if self.tied_embedding else 2) * self.head_matrix.parameters
        )


def _require_counts(given: Attention | Experts, where: str, may_be_zero: str = "") -> None:
    for field in fields(given):
        value, least = getattr(given, field.name), int(field.name != may_be_zero)
        if not isinstance(value, bool) and value < least:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT, f"{where}: {field.name} is {value}; give a whole number, {least} or more"
            )


def weights(matrices: tuple[Matrix, ...]) -> int:
    """Weights in all of them, which are also the multiply-adds of a token."""
    return sum(matrix.parameters for matrix in matrices)
