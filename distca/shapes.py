"""Attention shapes: as people write them, ``HEADS:KV_HEADS:HEAD_DIM:DTYPE``, and of a model.

Where values have another head dim than queries and keys, both are given:
``128:128:192/128:bfloat16``.
"""

from __future__ import annotations

from core_attention.shape import AttentionShape
from distca.train.settings import ModelSettings


def parse_shape(text: str) -> AttentionShape:
    """Reads for example ``32:8:128:bfloat16``.

    Raises:
        ValueError: it is written otherwise, or makes no valid shape.
    """
    parts = text.split(":")
    dims = parts[2].split("/") if len(parts) == 4 else []
    if not 1 <= len(dims) <= 2 or not all(part.isdecimal() for part in (*parts[:2], *dims)):
        raise ValueError(
            f"shape is {text!r}; write HEADS:KV_HEADS:HEAD_DIM:DTYPE, for example "
            "32:8:128:bfloat16, and HEAD_DIM as 192/128 if values have another one"
        )
    return AttentionShape(
        num_heads=int(parts[0]),
        num_heads_kv=int(parts[1]),
        head_dim=int(dims[0]),
        head_dim_v=int(dims[-1]),
        dtype=parts[3],
    )


def format_shape(shape: AttentionShape) -> str:
    """Writes what :func:`parse_shape` reads."""
    dims = f"{shape.head_dim}"
    if shape.head_dim_v != shape.head_dim:
        dims += f"/{shape.head_dim_v}"
    return f"{shape.num_heads}:{shape.num_heads_kv}:{dims}:{shape.dtype}"


def configured_shape(settings: ModelSettings) -> AttentionShape:
    """The shape of the model that ``settings`` describe; loads transformers only if it must.

    Raises:
        ModelConfigError: the model's JSON file cannot be used.
        ValueError: the model's sizes make no valid shape.
    """
    if settings.model_config is not None or settings.model_preset is not None:
        from distca.train.model import attention_shape, model_config

        return attention_shape(model_config(settings, max_positions=1), settings.dtype)
    head_dim = settings.hidden_size // settings.heads
    return AttentionShape(
        num_heads=settings.heads,
        num_heads_kv=settings.kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=settings.dtype.value,
    )
