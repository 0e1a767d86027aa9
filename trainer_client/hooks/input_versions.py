"""Tensors that are needed again, in memory that a model may write to."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainer_client.errors import ChangedInPlace


class Unwritten:
    """Tensors as they are now, for as long as nobody writes to them.

    Those of inference mode count no writes: it holds copies of them.

    Args:
        what: names them in errors.
        tensors: by name.
        copy: hold copies of all, which later writes do not reach.
    """

    def __init__(
        self, what: object, tensors: Mapping[str, torch.Tensor], *, copy: bool = False
    ) -> None:
        self._what = what
        self._tensors = {name: _held(tensor, copy=copy) for name, tensor in tensors.items()}
        self._versions = {name: tensor._version for name, tensor in self._tensors.items()}

    def get(self) -> Mapping[str, torch.Tensor]:
        """The tensors, detached."""

        changed = [
            name for name, at in self._versions.items() if self._tensors[name]._version != at
        ]
        if changed:
            raise ChangedInPlace(self._what, changed)
        return self._tensors


def _held(tensor: torch.Tensor, *, copy: bool) -> torch.Tensor:
    if not (copy or tensor.is_inference()):
        return tensor.detach()
    with torch.inference_mode(False):
        return tensor.detach().clone()
