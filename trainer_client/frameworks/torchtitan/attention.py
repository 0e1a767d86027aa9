"""The override of torchtitan's ``VarlenAttention`` whose core attention is served."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import derive, override
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.protocols.module import Module

from core_attention.host_copies import on_host
from core_attention.kernels.own import shape_of
from core_attention.score_rule import ScoreRule
from trainer_client.errors import SessionError
from trainer_client.frameworks.versions import UnsupportedSetting
from trainer_client.hooks.checkpointing import Checkpoints
from trainer_client.hooks.compile_boundary import outside_graphs
from trainer_client.hooks.pipelining_dry_run import for_shapes, is_shape_inference
from trainer_client.models.documents import documents_of
from trainer_client.models.found_options import ServedCall
from trainer_client.step.home import HomeCall, attend_at_home
from trainer_client.step.home_tasks import tasks_of_documents
from trainer_client.step.lane import (
    Lane,
    current_lane,
    current_step,
    is_unplanned_evaluation,
    require_lane,
)
from trainer_client.step.operation import core_attention_and_lse

_SIGNATURE = inspect.signature(VarlenAttention.forward)
"""torchtitan looks tensors up by their names here, which show their layout: q_BLNH or q_TNH."""

UNBOUNDED = -1
"""The first number of a window that shows all earlier keys."""


class ServedAttention(VarlenAttention):
    """Takes the place of ``VarlenAttention``; documents are those of the step's manifest.

    A layer with a window is computed at home, the others are served. Without gradients and outside
    of a step (validation) all are computed at home, for the documents of torchtitan's own masks.

    Queries, keys and values are ``[B, L, N, H]`` or ``[T, N, H]``, as the installed torchtitan has
    them, with the heads of this rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        # VarlenAttention's own would load a FlashAttention for this GPU.
        Module.__init__(self)
        if config.window_size[1] != 0:
            raise UnsupportedSetting(
                f"window_size of an attention layer is {config.window_size}; served core attention "
                "is causal: its second number must be 0"
            )
        self.window = window_of(config)

    @outside_graphs
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Core attention of one layer."""

        arguments = dict(_SIGNATURE.bind(self, *args, **kwargs).arguments)
        _, query, key, value, *_ = arguments.values()
        q, k, v = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (query, key, value))
        dtype: torch.dtype = v.dtype
        scale = arguments.get("scale") or q.shape[-1] ** -0.5
        masks = arguments.get("attention_masks")
        seen = SeenCalls.current.get()
        dry_run = is_shape_inference(Checkpoints().recomputed)
        at_home = not dry_run and is_validation()
        if not (dry_run or at_home):
            lane = _lane()
            if masks is not None:
                documents_of(lane).check({"cu_seq_lens_q": masks.cu_seq_q})
            dtype = getattr(torch, lane.running.job.shape.dtype)
        # All in one dtype: rotary embeddings may leave queries and keys in float32.
        q, k, v = (tensor.to(dtype).contiguous() for tensor in (q, k, v))
        if seen is not None:
            seen.note(q, k, v, scale, served=self.window is None)
        if at_home:
            o, lse = _attend_documents(q, k, v, masks, self.window, scale)
        else:
            o, lse = core_attention_and_lse(q, k, v, window=self.window, scale=scale)
        o = o.to(query.dtype).view(*query.shape[:-1], value.shape[-1])
        # The model's own function, for attention sinks.
        transform: Callable[..., torch.Tensor] | None = arguments.get("out_transform")
        return o if transform is None else transform(o, lse.view(*query.shape[:-1]))

    forward.__signature__ = _SIGNATURE  # type: ignore[attr-defined]


class SeenCalls:
    """The calls of a forward that is run for them alone, in :meth:`recording`.

    Attributes:
        served: those that servers are to compute.
        n_at_home: how many others there are.
    """

    current: ContextVar[SeenCalls | None] = ContextVar("distca_torchtitan_calls", default=None)

    def __init__(self) -> None:
        self.served: list[ServedCall] = []
        self.n_at_home = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Calls in the block are noted, and give zeros."""
        token = self.current.set(self)
        try:
            with for_shapes():
                yield
        finally:
            self.current.reset(token)

    def note(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, served: bool
    ) -> None:
        """Notes a call."""
        kind = q.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
        shape = shape_of(q.to(dtype), k, v)
        if served:
            self.served.append(ServedCall(shape, scale, q.device))
        else:
            self.n_at_home += 1


def window_of(config: VarlenAttention.Config) -> int | None:
    """Keys that a query of the layer sees at most, itself among them; None: all earlier ones."""
    left, _ = config.window_size
    return None if left == UNBOUNDED else left + 1


@override(target=VarlenAttention.Config, description="Core attention served by DistCA")
def served_varlen(config: VarlenAttention.Config) -> ServedAttention.Config:
    """Serve core attention by ``--override.imports
    trainer_client.frameworks.torchtitan.attention.served_varlen``."""
    made: ServedAttention.Config = derive(config, ServedAttention.Config)
    return made


def is_validation() -> bool:
    """Return whether the caller runs a model that nobody has planned: without gradients, outside of
    a step."""
    return (
        is_unplanned_evaluation()
        and current_lane.get() is None
        and Checkpoints().recomputed is None
    )


def _attend_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masks: Any,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse by this process's own kernel, within each document of torchtitan's ``masks``."""
    if masks is None:
        raise SessionError(
            "core attention is called without attention_masks outside of a step; hand the model "
            "positions and attention_masks, as torchtitan's Validator does"
        )
    tasks = tasks_of_documents(on_host(masks.cu_seq_q).tolist())
    call = HomeCall(tasks=tasks, rule=ScoreRule(window=window), scale=scale)
    o, lse, _ = attend_at_home(q, k, v, len(q), call, keep=lambda o, lse: None)
    return o, lse


def _lane() -> Lane:
    region = Checkpoints().recomputed
    if region is None and current_lane.get() is None and current_step.get() is None:
        raise SessionError(
            "core attention is called outside of a step of DistCA; train with "
            "trainer_client.frameworks.torchtitan.ServedTrainer, which served(config) chooses"
        )
    return require_lane()
