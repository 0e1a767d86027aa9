"""Options of a session, some of them found in the model."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainer_client.models.found_options import options_of_model
from trainer_client.options import RankOptions


class SessionOptions(RankOptions):
    """Options with which a rank joins a job: those of :class:`RankOptions`."""

    @classmethod
    def for_model(cls, model: nn.Module, **options: Any) -> SessionOptions:
        """Options whose ``n_layers``, ``shape``, ``softmax_scale`` and ``device`` follow from the
        models of transformers in ``model``. They run a few tokens, without gradients, and are left
        as they were; nothing is sent.

        Call it as the model is trained: on its device, in its dtype, inside ``torch.autocast`` if
        its steps are. Where weights are sharded, all ranks call it together. Under tensor
        parallelism ``shape`` is what one rank has, and ``tensor_parallel_ranks`` are found too.

        Raises:
            SessionError: no model has served core attention, or its calls differ in shape, dtype or
                scale; tensor-parallel ranks disagree, or do not divide the heads.
            ValueError: an option is invalid or contradicts the model, or the model cannot be served
                (``trainer_client.models.transformers.UnsupportedModel``).
        """
        return cls(**options_of_model(model, options))
