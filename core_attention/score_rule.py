"""The rules by which scores become weights, besides the softmax itself: which keys count, and the
softcap."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core_attention.ca_task import MaskKind


@dataclass(frozen=True, kw_only=True)
class ScoreRule:
    """The rule of a kernel call for the scores of its tasks.

    Attributes:
        mask: which keys a query sees.
        window: under the causal mask, how many keys a query sees at most, the last of which is its
            own; None: all before it.
        softcap: c of c * tanh(score / c), which takes the place of each scaled score; 0 is none.
    """

    mask: MaskKind = MaskKind.CAUSAL
    window: int | None = None
    softcap: float = 0.0

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window is {self.window}; it must be 1 or more, or None for no window"
            )
        if self.window is not None and self.mask is not MaskKind.CAUSAL:
            raise ValueError(
                f"window is {self.window} with mask {self.mask.name}; only causal attention has one"
            )
        check_softcap(self.softcap)

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        softcap = f", softcap {self.softcap:g}" if self.softcap else ""
        return f"{self.mask.name.lower()}{window}{softcap}"


def check_softcap(softcap: float) -> None:
    """Raises ValueError for a softcap that is not positive and finite, nor 0."""
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap is {softcap}; it must be a positive number, or 0 for none")


PLAIN = ScoreRule()
"""Causal, and nothing else."""
