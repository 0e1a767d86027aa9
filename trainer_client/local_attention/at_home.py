"""Core attention of models of transformers that nobody has planned: evaluation, generation,
reference models. It is computed where the model is, by PyTorch, with the mask that the model asks
for.

A forward pass is computed at home inside :func:`at_home`, and without that if it is under
``torch.no_grad`` and no nano-batch was chosen for it. Documents of one packed row are computed one
by one, so that no mask of rows times rows is made; whatever else a mask says (padding, caches,
windows) goes to PyTorch as transformers' ``"sdpa"`` implementation has it; with softcaps or sinks,
scores are made as ``"eager"`` makes them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from core_attention.errors import ManifestError
from trainer_client.hooks.checkpointing import HOME, Checkpoints, keep_nothing
from trainer_client.local_attention.plain import attend_by_scores, attend_documents, seen_rows
from trainer_client.step.home_tasks import FULL, LayerKind
from trainer_client.step.lane import current_lane, current_step
from trainer_client.turns.branches import Branches
from trainer_client.turns.manifests import lengths_of_documents

logger = logging.getLogger(__name__)

_asked_for: ContextVar[bool] = ContextVar("distca_at_home", default=False)
_served: ContextVar[bool] = ContextVar("distca_served_forward", default=False)
_said: set[str] = set()


@contextmanager
def at_home() -> Iterator[None]:
    """Models of transformers inside the block compute core attention themselves, with gradients or
    without: nothing is planned, sent or counted. For a reference model beside the one that is
    trained, and for losses on rows that no manifest has."""
    token = _asked_for.set(True)
    try:
        yield
    finally:
        _asked_for.reset(token)


@contextmanager
def served_forward() -> Iterator[None]:
    """Forward passes without gradients inside the block are planned and served as those with
    gradients are, by all ranks alike: for log-probabilities, reference models and evaluation.
    Elsewhere each rank computes them at home."""
    token = _served.set(True)
    try:
        yield
    finally:
        _served.reset(token)


def is_served_forward() -> bool:
    """Return whether the caller is in a block of :func:`served_forward`."""
    return _served.get()


def is_off() -> bool:
    """Return whether the environment has all core attention computed at home."""
    return os.environ.get("DISTCA_OFF", "") not in ("", "0")


def is_at_home() -> bool:
    """Return whether the caller computes its core attention at home."""
    region = Checkpoints().recomputed
    if region is not None:
        return region.caller is HOME
    if _asked_for.get() or is_off():
        return True
    if is_served_forward() or torch.is_grad_enabled() or current_lane.get() is not None:
        return False
    running = current_step.get()
    if running is None:
        return True
    # The only nano-batch of a step needs not be chosen.
    return running.job.n_nano_batches > 1 and not running.forward_only


@dataclass
class HomeMask:
    """A mask that is made when attention needs it.

    Attributes:
        asked: what transformers asked for: arguments of ``sdpa_mask``.
    """

    asked: dict[str, Any]
    known: dict[int, tuple[torch.Tensor, list[int] | None, torch.Tensor | None]] = field(
        default_factory=dict
    )
    """Positions, by their ``id``, since layers hand over the same tensor; the documents' lengths
    if nothing but documents hides keys; and what takes the place of :attr:`tensor`, or None."""
    _made: list[torch.Tensor | None] = field(default_factory=list)

    @property
    def tensor(self) -> torch.Tensor | None:
        """``[batch, 1, queries, keys]`` bool, True where a key is seen; None if it is causal."""
        if not self._made:
            self._made.append(sdpa_mask(**self.asked))
        return self._made[0]

    @property
    def follows_documents(self) -> bool:
        """Return whether it may hide nothing else than later keys and those of other documents: it
        is of one row without cache, padding, window or a function of the model's own."""
        asked = self.asked
        return (
            asked["batch_size"] == 1
            and asked["q_length"] == asked["kv_length"]
            and not asked.get("use_vmap")
            and asked.get("local_size") is None
            and not self.pads
        )

    @property
    def pads(self) -> bool:
        """Return whether some rows are padding."""
        padding = self.asked.get("attention_mask")
        return padding is not None and not bool(padding.all())


def attend_at_home(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float | None,
    dropout: float,
    lengths: list[int] | None,
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kind: LayerKind = FULL,
    branches: Branches | None = None,
) -> torch.Tensor:
    """Core attention of one layer.

    Args:
        module: the model's attention module.
        query: ``[batch, num_heads, queries, head_dim]``.
        key: ``[batch, num_heads_kv, keys, head_dim]``.
        value: ``[batch, num_heads_kv, keys, head_dim_v]``.
        mask: a :class:`HomeMask`, or a tensor of a model that makes its own; None: causal.
        scaling: None is 1 / sqrt(head_dim).
        dropout: of attention weights.
        lengths: of the documents of the only row, if the mask follows them; None: as the mask says.
        softcap: of the scores; 0 is none.
        sinks: ``[num_heads]``, or None.
        kind: of the layer, where the mask follows documents with ``branches``.
        branches: where the documents of ``lengths`` branch off.

    Returns:
        o ``[batch, queries, num_heads, head_dim_v]``.
    """
    _say_once()
    keep_nothing(query)
    tensor = mask.tensor if lengths is None and isinstance(mask, HomeMask) else mask
    if lengths is not None:
        o = attend_documents(
            query, key, value, lengths, scale=scaling, softcap=softcap, sinks=sinks, kind=kind,
            dropout=dropout, branches=branches,
        )  # fmt: skip
    elif softcap or sinks is not None:
        o = attend_by_scores(
            query,
            key,
            value,
            _shown(query, key, tensor),
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=softcap,
            sinks=sinks,
            dropout=dropout,
        )
    else:
        attended: torch.Tensor = sdpa_attention_forward(
            module, query, key, value, tensor, dropout=dropout, scaling=scaling
        )[0]
        return attended
    return o.transpose(1, 2).contiguous()


def _shown(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None
) -> Callable[[int, int], torch.Tensor]:
    """The keys that ``mask`` shows to some queries; None is causal."""
    if mask is not None:
        shown = mask[..., : key.shape[2]]
        return lambda begin, end: shown[:, :, begin:end]
    if query.shape[2] == 1:  # The newest token sees all of the cache.
        return lambda _begin, _end: query.new_ones(1, dtype=torch.bool)
    return seen_rows(query.device, key.shape[2])


def document_lengths(position_ids: torch.Tensor) -> list[int] | None:
    """Lengths of documents packed in one row ``[1, rows]``, by positions that restart at 0 and
    count up; None for other positions."""
    try:
        return lengths_of_documents(position_ids.flatten()) or None
    except ManifestError:
        return None


def _say_once() -> None:
    """Log that this is neither balanced nor measured, which may surprise."""
    why = (
        "in an at_home block"
        if _asked_for.get()
        else "a forward pass without gradients was not planned (evaluation, generation)"
    )
    if why not in _said:
        _said.add(why)
        logger.info("core attention is computed at home, by PyTorch: %s; this is said once", why)
