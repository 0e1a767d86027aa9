"""Padded batches as packed rows: trainers that pad (DPO, KTO, reward models) call a model with
``[batch, tokens]`` and an attention mask. Inside the model the padding is left out, so that nothing
is computed, planned or sent for it, and comes back as zeros in the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils.generic import ModelOutput

from trainer_client.step.manifests import is_padded


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """Where the tokens of a padded batch are.

    Attributes:
        mask: ``[batch, tokens]`` bool, true where no padding is.
    """

    mask: torch.Tensor

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> PaddedRows | None:
        """Of a call's arguments; None if these are of a packed row."""
        return cls(named["attention_mask"].bool()) if is_padded(named) else None

    def packed(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments for the one row ``[1, rows]`` of all tokens, documents in order, with
        ``position_ids`` that restart at 0 and without a mask."""
        positions = torch.arange(self.mask.shape[1], device=self.mask.device).expand(
            self.mask.shape
        )
        given = {**named, "attention_mask": None, "position_ids": positions}
        return {name: self._pack(value) for name, value in given.items()}

    def _pack(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape[:2] != self.mask.shape:
            return value
        return value[self.mask][None]

    def padded(self, output: Any) -> Any:
        """Outputs for the packed row, as those for the batch: zeros where padding is."""
        if isinstance(output, ModelOutput):
            return type(output)(**{name: self.padded(value) for name, value in output.items()})
        if isinstance(output, tuple | list):
            return type(output)(self.padded(each) for each in output)
        if not isinstance(output, torch.Tensor):
            return output
        n_rows = int(self.mask.sum())
        if output.shape[:2] == (1, n_rows):
            whole = output.new_zeros(*self.mask.shape, *output.shape[2:])
            whole[self.mask] = output[0]
            return whole
        if output.shape[:1] == (n_rows,):
            # Of experts' routers, for example.
            flat = self.mask.flatten()
            whole = output.new_zeros(len(flat), *output.shape[1:])
            whole[flat] = output
            return whole
        return output
