"""The override of torchtitan's ``VarlenAttention`` whose core attention is served."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import derive, override
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.protocols.module import Module

from trainer_client.errors import SessionError
from trainer_client.integrations.checkpointing import Checkpoints
from trainer_client.integrations.documents import documents_of
from trainer_client.integrations.frameworks import UnsupportedSetting
from trainer_client.integrations.graphs import outside_graphs
from trainer_client.integrations.probe import current_recorder
from trainer_client.integrations.shape_inference import is_shape_inference
from trainer_client.step.lane import Lane, current_lane, current_step, require_lane
from trainer_client.step.operation import core_attention

_SIGNATURE = inspect.signature(VarlenAttention.forward)
"""torchtitan looks tensors up by their names here, which tell of their layout: q_BLNH or q_TNH."""

_UNBOUNDED = -1


class ServedAttention(VarlenAttention):
    """Takes the place of ``VarlenAttention``; documents are those of the step's manifest.

    Queries, keys and values are ``[B, L, N, H]`` or ``[T, N, H]``, as the installed torchtitan has
    them, with the heads of this rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        # VarlenAttention's own would load a FlashAttention for this GPU.
        Module.__init__(self)
        left, right = config.window_size
        if right != 0:
            raise UnsupportedSetting(
                f"window_size of an attention layer is {config.window_size}; served core attention "
                "is causal: its second number must be 0"
            )
        self.window = None if left == _UNBOUNDED else left + 1

    @outside_graphs
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Core attention of one layer.

        Raises:
            UnsupportedSetting: the layer asks for what is not served.
            ValueError: the documents are not those of the manifest.
            SessionError: no step is running.
        """
        arguments = dict(_SIGNATURE.bind(self, *args, **kwargs).arguments)
        _, query, key, value, *_ = arguments.values()
        if arguments.get("out_transform") is not None:
            raise UnsupportedSetting(
                "an attention layer changes its output by its log-sum-exp (out_transform, for "
                "attention sinks); train such models with torchtitan's own attention"
            )
        scale = arguments.get("scale")
        q, k, v = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (query, key, value))
        if (recorder := current_recorder.get()) is not None:
            o = recorder.call(*_contiguous(q, k, v, v.dtype), scale)
        elif is_shape_inference(Checkpoints().recomputed):
            o = core_attention(*_contiguous(q, k, v, v.dtype))
        else:
            lane = _lane()
            self._check(lane, scale, arguments.get("attention_masks"))
            dtype: torch.dtype = getattr(torch, lane.running.job.shape.dtype)
            o = core_attention(*_contiguous(q, k, v, dtype))
        return o.to(query.dtype).view(*query.shape[:-1], value.shape[-1])

    forward.__signature__ = _SIGNATURE  # type: ignore[attr-defined]

    def _check(self, lane: Lane, scale: float | None, masks: Any) -> None:
        documents = documents_of(lane)
        if masks is not None:
            documents.check({"cu_seq_lens_q": masks.cu_seq_q})
        if self.window is not None and self.window < documents.longest:
            raise UnsupportedSetting(
                f"an attention layer has a window of {self.window} tokens, and {documents.where} a "
                f"document of {documents.longest}; give shorter documents, or train such models "
                "with torchtitan's own attention"
            )
        served = lane.running.job.scale
        if scale is not None and abs(scale - served) > 1e-6 * served:
            raise UnsupportedSetting(
                f"an attention layer scales by {scale}, and the session by {served}; all served "
                "layers of a job have one scale"
            )


@override(target=VarlenAttention.Config, description="Core attention served by DistCA")
def served_varlen(config: VarlenAttention.Config) -> ServedAttention.Config:
    """For ``--override.imports trainer_client.integrations.torchtitan.attention.served_varlen``."""
    made: ServedAttention.Config = derive(config, ServedAttention.Config)
    return made


def _lane() -> Lane:
    region = Checkpoints().recomputed
    if region is None and current_lane.get() is None and current_step.get() is None:
        raise SessionError(
            "core attention is called outside of a step of DistCA; train with "
            "trainer_client.integrations.torchtitan.ServedTrainer, which served(config) chooses"
        )
    return require_lane()


def _contiguous(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All in one dtype: rotary embeddings may leave queries and keys in float32."""
    return q.to(dtype).contiguous(), k.to(dtype).contiguous(), v.to(dtype).contiguous()
