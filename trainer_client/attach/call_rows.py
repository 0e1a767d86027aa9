"""The documents of a model's call, read from its arguments when it comes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from core_attention.errors import ManifestError
from core_attention.host_copies import on_device, on_host
from trainer_client.turns.manifests import lengths_of_documents, padded_lengths
from trainer_client.turns.padded_rows import PaddedRows


@dataclass(frozen=True, eq=False)
class CallRows:
    """The rows of a call.

    Attributes:
        lengths: of the documents, in packed order.
        padded: where they are in a batch of several rows or with padding; None: they are the only
            row.
    """

    lengths: list[int]
    padded: PaddedRows | None

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> CallRows:
        """Read a call's arguments: documents begin where ``position_ids`` restart at 0, or where
        ``cu_seq_lens_q`` says; else each row of the batch is one.

        Raises:
            ManifestError: they do not say where documents begin, or contradict one another.
        """
        given = named.get("input_ids")
        given = named.get("inputs_embeds") if given is None else given
        if not isinstance(given, torch.Tensor) or given.dim() < 2:
            raise ManifestError("the call has no input_ids nor inputs_embeds [batch, tokens]")
        shape = (int(given.shape[0]), int(given.shape[1]))
        mask, positions = _mask_of(named, shape), named.get("position_ids")
        if mask is not None:
            lengths = padded_lengths(mask)
            _check_positions(positions, mask)
            rows = mask.flatten().nonzero().squeeze(1)
            return cls(lengths, PaddedRows(shape, on_device(rows, given.device)))
        if (cumulative := named.get("cu_seq_lens_q")) is not None:
            lengths = on_host(cumulative).diff().tolist()
        elif positions is not None:
            expanded = on_host(positions).expand(shape)
            lengths = [length for row in expanded for length in lengths_of_documents(row)]
        else:
            lengths = [shape[1]] * shape[0]
        if sum(lengths) != shape[0] * shape[1]:
            raise ManifestError(f"cu_seq_lens_q has {sum(lengths)} tokens, the batch {shape}")
        rows = torch.arange(shape[0] * shape[1])
        padded = PaddedRows(shape, on_device(rows, given.device)) if shape[0] != 1 else None
        return cls(lengths, padded)

    def positions(self, device: torch.device) -> torch.Tensor:
        """``[1, rows]``: those of the packed row, which restart at 0 in each document."""
        ends = torch.tensor(self.lengths).cumsum(0)
        begins = torch.cat([ends.new_zeros(1), ends[:-1]])
        offsets = begins.repeat_interleave(torch.tensor(self.lengths))
        return on_device((torch.arange(len(offsets)) - offsets)[None], device)


def _mask_of(named: Mapping[str, Any], shape: tuple[int, int]) -> torch.Tensor | None:
    """Return the tokens that count, on the host; None if all do."""
    mask = named.get("attention_mask")
    if not isinstance(mask, torch.Tensor):
        # None, or those that the model has made for kinds of layers, which look at them.
        return None
    if tuple(mask.shape) != shape:
        raise ManifestError(
            f"attention_mask is {tuple(mask.shape)}, and documents are read from masks {shape}, "
            "[batch, tokens]: leave it out, or mark documents by position_ids that restart at 0"
        )
    seen = on_host(mask).bool()
    return None if bool(seen.all()) else seen


def _check_positions(positions: torch.Tensor | None, mask: torch.Tensor) -> None:
    """Check that positions count a padded row's tokens, as its mask does."""
    if positions is None:
        return
    counted = mask.cumsum(1) - 1
    told = on_host(positions).expand(mask.shape)
    if positions.dim() > 2 or not torch.equal(told[mask], counted[mask]):
        raise ManifestError(
            "attention_mask has padding, and position_ids do not count each row's tokens from 0: "
            "leave one of the two out"
        )
