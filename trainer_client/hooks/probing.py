"""The probe that a forward of a model runs in, if one does: core attention answers it first."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

import torch

from core_attention.ca_task import MaskKind


class Probe(Protocol):
    """Takes the calls of core attention of one forward, in which none is computed."""

    def call(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
        *,
        softcap: float | None = None,
        mask: MaskKind = MaskKind.CAUSAL,
        served: bool = True,
    ) -> torch.Tensor:
        """Notes a call; returns zeros in the place of o."""


current_probe: ContextVar[Probe | None] = ContextVar("distca_probe", default=None)
