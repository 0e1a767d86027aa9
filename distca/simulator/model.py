"""Model shapes: what the linear layers of a transformer cost, and the shape of its attention."""

from __future__ import annotations

from dataclasses import dataclass

from core_attention.shape import AttentionShape
from distca.simulator.errors import InputError, require_count

_OPERATIONS_PER_WEIGHT = 2
"""A multiply and an add for each weight and token of a matrix product."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A dense decoder with grouped-query attention and a gated feed-forward layer (Llama).

    Attributes:
        name: for people.
        n_layers: decoder layers, each with one core attention.
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward layer, which has three matrices.
        num_heads, num_heads_kv, head_dim: of the attention.
        vocab_size: rows of the output head.
    """

    name: str
    n_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_heads_kv: int
    head_dim: int = 128
    vocab_size: int = 128256

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if field != "name":
                require_count(field, value)
        if self.num_heads % self.num_heads_kv:
            raise InputError(
                f"num_heads {self.num_heads} is not a multiple of num_heads_kv {self.num_heads_kv}"
            )

    @property
    def attention_shape(self) -> AttentionShape:
        """Heads and head dims of the core attention, in bfloat16."""
        return AttentionShape(
            num_heads=self.num_heads,
            num_heads_kv=self.num_heads_kv,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim,
            dtype="bfloat16",
        )

    @property
    def linear_flops_per_token(self) -> int:
        """Forward operations of one layer's matrix products for one token (8B: 436 million)."""
        attention = 2 * self.num_heads * self.head_dim + 2 * self.num_heads_kv * self.head_dim
        return _OPERATIONS_PER_WEIGHT * self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def head_flops_per_token(self) -> int:
        """Forward operations of the output head for one token."""
        return _OPERATIONS_PER_WEIGHT * self.hidden_size * self.vocab_size


PRESETS = {
    "llama-3-8b": ModelSpec(
        name="llama-3-8b",
        n_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_heads_kv=8,
    ),
    # The 34B of the paper: 48 layers, width 8192, 64 heads, 16 of them for keys and values. The
    # feed-forward width, which the paper does not give, is Code Llama 34B's; with it the layers
    # hold 34 billion weights.
    "llama-34b": ModelSpec(
        name="llama-34b",
        n_layers=48,
        hidden_size=8192,
        intermediate_size=22016,
        num_heads=64,
        num_heads_kv=16,
    ),
}


def preset(name: str) -> ModelSpec:
    """The model called ``name``.

    Raises:
        InputError: there is no such preset.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise InputError(f"model is {name!r}; valid are {', '.join(sorted(PRESETS))}") from None
