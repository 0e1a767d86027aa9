"""Options of a session, some of them found in the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainer_client.hooks.tensor_parallel import with_group
from trainer_client.models.probe import probe_model
from trainer_client.options import RankOptions


class SessionOptions(RankOptions):
    """Options with which a rank joins a job: those of :class:`RankOptions`."""

    @classmethod
    def for_model(
        cls, model: nn.Module, *, inputs: Mapping[str, Any] | None = None, **options: Any
    ) -> SessionOptions:
        """Options whose ``n_layers``, ``shape``, ``softmax_scale`` and ``device`` are found by one
        forward of a few tokens. The model is left as it was, and nothing is sent.

        Call it as the model is trained: on its device, in its dtype, inside ``torch.autocast`` if
        its steps are, and before its weights are sharded by ``fully_shard``.
        DistributedDataParallel, PingPong, ``torch.compile`` and adapters may be around it.

        Under tensor parallelism call it after that was applied, on all ranks of a group together:
        ``shape`` is then what one rank has, and ``tensor_parallel_ranks`` are found too.

        Args:
            model: what calls core attention.
            inputs: keyword arguments of one forward; not needed for models of transformers.
            options: of the session. Those that the probe finds are checked against it.

        Raises:
            SessionError: the model's weights are sharded by ``fully_shard`` or on the meta device,
                it does not call core attention, or its calls differ in shape, dtype or scale; the
                heads cannot be divided among tensor-parallel ranks, or these disagree.
            ValueError: an option has an invalid value or contradicts the model, or ``inputs`` are
                needed.
        """
        found = probe_model(model, inputs)
        return cls(**with_group(model, found.complete(options)))
