"""What a loop does beside training, as its user would write it; on a CPU what needs no GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from tests.cluster.gpu_loops.matrix import ACTIONS

COMPILED_STEP = 2
SAVED_STEP = 1
SIDE = 48
"""Of the matrices whose inverses and the like are computed."""


class Hazards:
    """What is done at each place of one loop.

    Args:
        name: of the hazard.
        model: what is trained, also inside wrappers.
        device: of the rank.
        folder: for checkpoints, the same on all ranks.
    """

    def __init__(self, name: str, model: Any, device: torch.device, folder: Path) -> None:
        self._model, self._device, self._folder = model, device, folder
        self._step, self._loss = 0, torch.zeros(())
        self._matrix = torch.eye(SIDE, device=device)
        self._batch: Mapping[str, Any] = {}
        self._at = {place: getattr(self, f"_{what}") for place, what in ACTIONS[name].items()}
        self._hook(model.model.layers[0].mlp)

    def _hook(self, part: nn.Module) -> None:
        def act(place: str) -> Callable[..., None]:
            return lambda *_: self._at[place]()

        def on_tensor(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(act("tensor_hook"))

        if "forward_hook" in self._at:
            part.register_forward_hook(act("forward_hook"))
        if "backward_hook" in self._at:
            part.register_full_backward_hook(act("backward_hook"))
        if "tensor_hook" in self._at:
            part.register_forward_hook(on_tensor)

    def before_step(self, step: int, batch: Mapping[str, Any]) -> None:
        self._step, self._batch = step, batch
        self._do("before_step")

    def after_forward(self, loss: torch.Tensor) -> None:
        self._loss = loss.detach()
        self._do("after_forward")

    def after_backward(self) -> None:
        """Before the optimiser's step."""
        self._do("after_backward")

    def after_update(self) -> None:
        self._do("after_update")

    def _do(self, place: str) -> None:
        if place in self._at:
            self._at[place]()

    def _item(self) -> None:
        self._loss.item()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _empty_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _clip(self) -> None:
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)

    def _compile(self) -> None:
        if self._step == COMPILED_STEP:
            self._model.model.layers[1].compile(dynamic=True)

    def _svd(self) -> None:
        torch.linalg.svd(self._matrix)

    def _inverse(self) -> None:
        torch.linalg.inv(self._matrix)

    def _fft(self) -> None:
        torch.fft.rfft2(self._matrix)

    def _reduce_metric(self) -> None:
        dist.all_reduce(torch.ones(1, device=self._device))

    def _save(self) -> None:
        if self._step == SAVED_STEP and dist.get_rank() == 0:
            with tempfile.TemporaryFile() as file:
                torch.save(self._model.state_dict(), file)

    def _save_distributed(self) -> None:
        if self._step == SAVED_STEP:
            save(self._model.state_dict(), checkpoint_id=self._folder)

    def _evaluate(self) -> None:
        """With core attention at home."""
        self._model.eval()
        with torch.no_grad():
            batch = self._batch.items()
            self._model(**{name: tensor.to(self._device) for name, tensor in batch})
        self._model.train()
