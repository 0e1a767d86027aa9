"""The attention shape of a model."""

from __future__ import annotations

from core_attention.shape import AttentionShape
from distca.errors import SettingsError
from distca.train.settings import ModelSettings


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


def local_shape(shape: AttentionShape, n_ranks: int) -> AttentionShape:
    """The heads of one of ``n_ranks`` tensor-parallel ranks.

    Raises:
        SettingsError: they cannot share them.
    """
    try:
        return shape.share(n_ranks)
    except ValueError as error:
        raise SettingsError(f"--tensor-parallel is {n_ranks}, and {error}") from error
