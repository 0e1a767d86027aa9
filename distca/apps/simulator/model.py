"""Model shapes: what the linear layers of a transformer cost, and the shape of its attention."""

from __future__ import annotations

from dataclasses import dataclass

from core_attention.shape import AttentionShape
from distca.apps.simulator.errors import InputError, require_count

_OPERATIONS_PER_WEIGHT = 2
"""A multiply and an add for each weight and token of a matrix product."""


@dataclass(frozen=True, kw_only=True)
class LatentProjections:
    """How multi-head latent attention (DeepSeek) makes queries, keys and values of hidden states.

    Attributes:
        kv_rank: width of the latent that every head's keys and values are made of.
        rope_dim: dimensions of queries and keys with rotary positions; keys share them over heads.
        q_rank: width of the latent of the queries; None makes them of the hidden state.
    """

    kv_rank: int
    rope_dim: int
    q_rank: int | None = None

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if value is not None:
                require_count(field, value)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder with a gated feed-forward layer, and grouped-query attention (Llama) or multi-head
    latent attention (DeepSeek).

    Attributes:
        name: for people.
        n_layers: decoder layers, each with one core attention.
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward layer, which has three matrices; with experts,
            of all that a token goes through.
        num_heads, num_heads_kv: of the attention.
        head_dim: of queries and keys.
        head_dim_v: of values; None is ``head_dim``.
        latent: of multi-head latent attention; None projects hidden states at once.
        vocab_size: rows of the output head.
    """

    name: str
    n_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_heads_kv: int
    head_dim: int = 128
    head_dim_v: int | None = None
    latent: LatentProjections | None = None
    vocab_size: int = 128256

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if field not in ("name", "latent") and value is not None:
                require_count(field, value)
        if self.num_heads % self.num_heads_kv:
            raise InputError(
                f"num_heads {self.num_heads} is not a multiple of num_heads_kv {self.num_heads_kv}"
            )
        if self.latent is not None and self.head_dim <= self.latent.rope_dim:
            raise InputError(
                f"head_dim is {self.head_dim}; with latent attention it must exceed the "
                f"{self.latent.rope_dim} dimensions of rotary positions"
            )

    @property
    def value_dim(self) -> int:
        """Dimensions of a head's values."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def attention_shape(self) -> AttentionShape:
        """Heads and head dims of the core attention, in bfloat16."""
        return AttentionShape(
            num_heads=self.num_heads,
            num_heads_kv=self.num_heads_kv,
            head_dim=self.head_dim,
            head_dim_v=self.value_dim,
            dtype="bfloat16",
        )

    @property
    def linear_flops_per_token(self) -> int:
        """Forward operations of one layer's matrix products for one token (8B: 436 million)."""
        output = self.num_heads * self.value_dim * self.hidden_size
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        return _OPERATIONS_PER_WEIGHT * (self._input_weights + output + feed_forward)

    @property
    def _input_weights(self) -> int:
        """Weights between a layer's hidden states and its queries, keys and values."""
        q_width = self.num_heads * self.head_dim
        if self.latent is None:
            kv_width = self.num_heads_kv * (self.head_dim + self.value_dim)
            return self.hidden_size * (q_width + kv_width)
        latent = self.latent
        kv_width = self.num_heads_kv * (self.head_dim - latent.rope_dim + self.value_dim)
        keys_and_values = self.hidden_size * (latent.kv_rank + latent.rope_dim)
        keys_and_values += latent.kv_rank * kv_width
        if latent.q_rank is None:
            return self.hidden_size * q_width + keys_and_values
        return (self.hidden_size + q_width) * latent.q_rank + keys_and_values

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
    # Mixtures of experts: intermediate_size is that of the routed and shared experts of a token,
    # which is also about what the first, dense layers have.
    "deepseek-v2-lite": ModelSpec(
        name="deepseek-v2-lite",
        n_layers=27,
        hidden_size=2048,
        intermediate_size=8 * 1408,
        num_heads=16,
        num_heads_kv=16,
        head_dim=192,
        head_dim_v=128,
        latent=LatentProjections(kv_rank=512, rope_dim=64),
        vocab_size=102400,
    ),
    "deepseek-v2": ModelSpec(
        name="deepseek-v2",
        n_layers=60,
        hidden_size=5120,
        intermediate_size=8 * 1536,
        num_heads=128,
        num_heads_kv=128,
        head_dim=192,
        head_dim_v=128,
        latent=LatentProjections(kv_rank=512, rope_dim=64, q_rank=1536),
        vocab_size=102400,
    ),
    "deepseek-v3": ModelSpec(
        name="deepseek-v3",
        n_layers=61,
        hidden_size=7168,
        intermediate_size=9 * 2048,
        num_heads=128,
        num_heads_kv=128,
        head_dim=192,
        head_dim_v=128,
        latent=LatentProjections(kv_rank=512, rope_dim=64, q_rank=1536),
        vocab_size=129280,
    ),
}


def preset(name: str) -> ModelSpec:
    """The model called ``name``."""
    try:
        return PRESETS[name]
    except KeyError:
        raise InputError(f"model is {name!r}; valid are {', '.join(sorted(PRESETS))}") from None
