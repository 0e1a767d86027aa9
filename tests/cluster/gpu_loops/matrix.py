"""What loops do that may hold up a GPU, in every kind of loop: the combinations that are run."""

from __future__ import annotations

from dataclasses import dataclass

ACTIONS: dict[str, dict[str, str]] = {
    "none": {},
    "item-before-backward": {"after_forward": "item"},
    "item-after-backward": {"after_backward": "item"},
    "synchronize-before-backward": {"after_forward": "synchronize"},
    "synchronize-after-backward": {"after_backward": "synchronize"},
    "empty-cache-before-backward": {"after_forward": "empty_cache"},
    "empty-cache-after-backward": {"after_backward": "empty_cache"},
    "adamw-fused": {},
    "adamw-foreach": {},
    "clip-gradients": {"after_backward": "clip"},
    "compile-a-layer": {"before_step": "compile"},
    "svd-in-forward": {"forward_hook": "svd"},
    "fft-in-backward": {"tensor_hook": "fft"},
    "inverse-in-backward-hook": {"backward_hook": "inverse"},
    "svd-between-steps": {"after_update": "svd"},
    "fft-after-backward": {"after_backward": "fft"},
    "checkpoint": {"after_update": "save"},
    "distributed-checkpoint": {"after_update": "save_distributed"},
    "evaluation": {"after_update": "evaluate"},
    "metric-before-backward": {"after_forward": "reduce_metric"},
    "metric-after-backward": {"after_backward": "reduce_metric"},
    "metric-in-forward-hook": {"forward_hook": "reduce_metric"},
    "accumulation": {},
}
"""By hazard: where in the loop something is done, and what; see ``hazards`` and ``rank``."""

WRAPPERS = ("ddp", "fsdp", "own")
"""DistributedDataParallel, FSDP2, and an all-reduce of the loop's own after the backward pass."""

_PLACEMENTS = ("in-place", "in-place", "mixed")
_TURNS = (2, 1, 2, 1, 1)

MORE = (
    ("none", "ddp", "in-place", 1),
    ("none", "ddp", "mixed", 2),
    ("none", "fsdp", "mixed", 1),
    ("none", "own", "in-place", 1),
    ("adamw-fused", "ddp", "in-place", 1),
    ("adamw-fused", "ddp", "mixed", 2),
    ("svd-in-forward", "ddp", "mixed", 2),
    ("metric-in-forward-hook", "ddp", "mixed", 1),
)
"""Further ones, where one of these choices may matter alone."""


@dataclass(frozen=True)
class Combination:
    """One loop: two ranks, each in a process of its own.

    Attributes:
        hazard: of :data:`ACTIONS`.
        wrapper: of :data:`WRAPPERS`.
        placement: of the job.
        turns: parts of a row that take turns.
    """

    hazard: str
    wrapper: str
    placement: str
    turns: int

    @property
    def name(self) -> str:
        """Also of its job."""
        return f"{self.hazard}-{self.wrapper}-{self.placement}-{self.turns}"


def combinations() -> list[Combination]:
    """Every hazard under every wrapper, placements and turns alternating, and :data:`MORE`."""
    crossed = [
        Combination(
            hazard,
            wrapper,
            _PLACEMENTS[(row + column) % len(_PLACEMENTS)],
            _TURNS[(row + 2 * column) % len(_TURNS)],
        )
        for row, hazard in enumerate(ACTIONS)
        for column, wrapper in enumerate(WRAPPERS)
    ]
    chosen = dict.fromkeys([*crossed, *(Combination(*each) for each in MORE)])
    # What takes longest first, so that nothing waits for it at the end.
    return sorted(chosen, key=lambda each: "compile" not in ACTIONS[each.hazard].values())
