"""Padded batches as packed rows: trainers that pad (DPO, KTO, reward models) call a model with
``[batch, tokens]`` and an attention mask. Inside the model the padding is left out, so that nothing
is computed, planned or sent for it, and comes back as zeros in the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """The places of the tokens of a padded batch.

    Attributes:
        shape: of the batch, ``(batch, tokens)``.
        rows: ``[n_rows]`` int64, the places of its tokens in the flattened batch, in order. Finding
            them waits for the device, so it is done once.
    """

    shape: tuple[int, int]
    rows: torch.Tensor

    def packed(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments for the one row ``[1, n_rows]`` of all tokens, documents in order, with
        ``position_ids`` that restart at 0 and without a mask."""
        given = {name: self._pack(value) for name, value in named.items()}
        return {**given, "attention_mask": None, "position_ids": self._positions()}

    def _positions(self) -> torch.Tensor:
        """``[1, n_rows]``, from 0 up in each row of the batch; does not wait for the device."""
        row = self.rows // self.shape[1]
        places = torch.arange(len(row), device=row.device)
        return (places - torch.searchsorted(row, row))[None]

    def _pack(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape[:2] != self.shape:
            return value
        return value.flatten(0, 1)[self.rows][None]

    def padded(self, output: Any) -> Any:
        """Outputs for the packed row, as those for the batch: zeros where padding is."""
        return tree_map(self._pad, output)

    def _pad(self, output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return output
        n_rows = len(self.rows)
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
