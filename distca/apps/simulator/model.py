"""Model shapes: what the linear layers of a transformer cost, and the shape of its attention."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_attention.shape import AttentionShape
from distca.contract.checks import check_least

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
        check_least(self, **dict.fromkeys(vars(self), 1))


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
        check_least(self, **dict.fromkeys(vars(self).keys() - {"name", "latent"}, 1))
        if self.num_heads % self.num_heads_kv:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_heads_kv {self.num_heads_kv}"
            )
        if self.latent is not None and self.head_dim <= self.latent.rope_dim:
            raise ValueError(
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


def _read(name: str, row: dict[str, Any]) -> ModelSpec:
    latent = LatentProjections(**row.pop("latent")) if "latent" in row else None
    return ModelSpec(name=name, latent=latent, **row)


PRESETS = {
    name: _read(name, row)
    for name, row in tomllib.loads(
        Path(__file__).with_name("models.toml").read_text(encoding="utf-8")
    ).items()
}


def preset(name: str) -> ModelSpec:
    """The model called ``name``."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ValueError(f"model is {name!r}; valid are {', '.join(sorted(PRESETS))}") from None
