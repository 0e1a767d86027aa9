"""Log-probabilities of tokens that rows of logits predict, where a row may predict several."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from core_attention.host_copies import on_device

CHUNK_ROWS = 1024
"""Rows whose logits are held in float32 at a time: 0.5 GB of a vocabulary of 128K."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""Makes logits ``[1, rows, vocabulary]`` of hidden states ``[1, rows, hidden]``."""


def score(
    given: torch.Tensor,
    head: Head | None,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float,
    *,
    entropies: bool,
) -> tuple[torch.Tensor, ...]:
    """Score tokens by the softmax of ``logits / temperature``, which is computed once a row and, as
    it is not kept, once more in the backward pass.

    Args:
        given: logits ``[n, vocabulary]``; with ``head`` hidden states ``[n, hidden]``.
        head: makes logits of hidden states, for :data:`CHUNK_ROWS` rows at a time.
        rows: ``[scored]`` int64 on the CPU, ascending, those that predict a token.
        tokens: ``[scored]`` int64 on the CPU.
        temperature: above 0.
        entropies: whether to compute them.

    Returns:
        Log-probabilities of the tokens, and if asked for the entropies of what they are drawn from;
        ``[scored]``, float32 or wider.
    """

    def scored(
        part: torch.Tensor, at: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        logits = part if head is None else head(part[None])[0]
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logits = logits.to(dtype)
        # Each pass over logits is a percent of a step of a tree with long completions.
        logs = (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)
        if not entropies:
            return (logs[at, chosen],)
        # Clamped, so that 0 * log(0) is 0.
        of_rows = -(logs.exp() * logs.clamp(min=torch.finfo(dtype).min)).sum(-1)
        return logs[at, chosen], of_rows[at]

    begins = torch.arange(0, max(len(given), 1), CHUNK_ROWS)
    sizes = torch.searchsorted(rows, begins).diff(append=torch.tensor([len(rows)])).tolist()
    places, chosen = (on_device(each, given.device) for each in (rows % CHUNK_ROWS, tokens))
    parts = zip(given.split(CHUNK_ROWS), places.split(sizes), chosen.split(sizes), strict=True)
    found = [checkpoint(scored, *part, use_reentrant=False) for part in parts]
    return tuple(torch.cat(each) for each in zip(*found, strict=True))
