"""The documents of a model's call, read from its arguments when it comes, and its rows packed.

Trainers that pad call a model with ``[batch, tokens]`` and an attention mask. Inside the decoder
padding is left out, so that nothing is computed, planned or sent for it, and comes back as zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from core_attention.errors import ManifestError
from core_attention.host_copies import on_device, on_host
from trainer_client.turns.branches import TREE_ARGUMENTS, RowDocuments
from trainer_client.turns.manifests import (
    lengths_between,
    lengths_of_documents,
    numbered_lengths,
    padded_lengths,
)


@dataclass(frozen=True, eq=False)
class CallRows:
    """The rows of a call.

    Attributes:
        documents: in packed order.
        shape: of the batch, ``(batch, tokens)``.
        rows: ``[n_rows]`` int64, the places of its tokens in the flattened batch, in order; None:
            the batch is one row without padding.
    """

    documents: RowDocuments
    shape: tuple[int, int]
    rows: torch.Tensor | None

    @property
    def lengths(self) -> list[int]:
        """Rows of each document."""
        return self.documents.lengths

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> CallRows:
        """Read a call's arguments: documents begin where ``position_ids`` restart at 0, or where
        ``cu_seq_lens_q`` or the numbers of a mask say (``1 1 2 2 2 0``); else each row of the batch
        is one. Documents that share prefixes have arguments of their own, see
        :data:`trainer_client.turns.branches.TREE_ARGUMENTS`."""
        given = named.get("input_ids")
        given = named.get("inputs_embeds") if given is None else given
        if not isinstance(given, torch.Tensor) or given.dim() < 2:
            raise ManifestError("the call has no input_ids nor inputs_embeds [batch, tokens]")
        shape = (int(given.shape[0]), int(given.shape[1]))
        if 0 in shape:
            return cls(RowDocuments([]), shape, None)
        mask, positions = _mask_of(named, shape), named.get("position_ids")
        if (tree := RowDocuments.of_tree(named, shape[0] * shape[1])) is not None:
            found = cls(tree, shape, None)
            _check_tree(found, mask, positions)
            return found
        if mask is not None:
            lengths = padded_lengths(mask.bool()) if mask.max() == 1 else numbered_lengths(mask)
            seen = on_device(mask.flatten().nonzero().squeeze(1), given.device)
            found = cls(RowDocuments(lengths), shape, seen)
            _check_positions(positions, mask, found.positions(mask.device)[0])
            return found
        if (cumulative := named.get("cu_seq_lens_q")) is not None:
            lengths = lengths_between(cumulative)
        elif positions is not None:
            if positions.dim() > 2:
                raise ManifestError(
                    f"position_ids are {tuple(positions.shape)}, as of pictures; documents are "
                    f"read from those {shape}, [batch, tokens]: train the text-only class"
                )
            expanded = on_host(positions).expand(shape)
            lengths = [length for row in expanded for length in lengths_of_documents(row)]
        else:
            lengths = [shape[1]] * shape[0]
        if sum(lengths) != shape[0] * shape[1]:
            raise ManifestError(f"cu_seq_lens_q has {sum(lengths)} tokens, the batch {shape}")
        rows = torch.arange(shape[0] * shape[1])
        rows_of = on_device(rows, given.device) if shape[0] != 1 else None
        return cls(RowDocuments(lengths), shape, rows_of)

    def positions(self, device: torch.device) -> torch.Tensor:
        """``[1, rows]``: those of the packed row, which restart in each document at its offset."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        before = lengths.cumsum(0) - lengths - torch.tensor(self.documents.offsets)
        begins = before.repeat_interleave(lengths)
        return on_device((torch.arange(len(begins)) - begins)[None], device)

    def packed(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments for the one row ``[1, n_rows]`` of all tokens, documents in order."""
        given = {name: value for name, value in named.items() if name not in TREE_ARGUMENTS}
        return {name: self._pack(value) for name, value in given.items()}

    def padded(self, output: Any) -> Any:
        """Outputs for the packed row, as those for the batch: zeros where padding is."""
        return output if self.rows is None else tree_map(self._pad, output)

    def _pack(self, value: Any) -> Any:
        of_batch = isinstance(value, torch.Tensor) and value.shape[:2] == self.shape
        return value.flatten(0, 1)[self.rows][None] if of_batch and self.rows is not None else value

    def _pad(self, output: Any) -> Any:
        n_rows = sum(self.lengths)
        if not isinstance(output, torch.Tensor):
            return output
        if output.shape[:2] == (1, n_rows):
            return self._spread(output[0]).unflatten(0, self.shape)
        # Of experts' routers, for example.
        return self._spread(output) if output.shape[:1] == (n_rows,) else output

    def _spread(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` in their places in the flattened batch."""
        batch, tokens = self.shape
        whole = rows.new_zeros(batch * tokens, *rows.shape[1:])
        whole[self.rows] = rows
        return whole


def _mask_of(named: Mapping[str, Any], shape: tuple[int, int]) -> torch.Tensor | None:
    """Return the mask on the host, 0 where padding is; None if it says nothing."""
    mask = named.get("attention_mask")
    if not isinstance(mask, torch.Tensor):
        # None, or those that the model has made for kinds of layers, which look at them.
        return None
    if tuple(mask.shape) != shape:
        raise ManifestError(
            f"attention_mask is {tuple(mask.shape)}, and documents are read from masks {shape}, "
            "[batch, tokens]: leave it out, or mark documents by position_ids that restart at 0"
        )
    told = on_host(mask).long()
    return None if bool((told == 1).all()) else told


def _check_tree(found: CallRows, mask: torch.Tensor | None, positions: torch.Tensor | None) -> None:
    """Check that a tree is one row without padding, and that positions count along its paths."""
    if found.shape[0] != 1 or mask is not None:
        raise ManifestError(
            f"documents share prefixes in a batch {found.shape}; give one row [1, rows], without "
            "padding or numbers in attention_mask"
        )
    counted = found.positions(torch.device("cpu"))
    if positions is not None and not torch.equal(on_host(positions).expand(found.shape), counted):
        raise ManifestError(
            "position_ids and document_offsets disagree: in each document they count up by one "
            "from its offset"
        )


def _check_positions(
    positions: torch.Tensor | None, mask: torch.Tensor, counted: torch.Tensor
) -> None:
    """Check that positions count each document's tokens, as its mask does."""
    if positions is None:
        return
    if positions.dim() > 2 or not torch.equal(
        on_host(positions).expand(mask.shape)[mask != 0], counted
    ):
        raise ManifestError(
            "attention_mask has padding or numbers, and position_ids do not count each document's "
            "tokens from 0: leave one of the two out"
        )
