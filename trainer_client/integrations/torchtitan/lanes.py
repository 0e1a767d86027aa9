"""A batch cut into nano-batches that take turns: at the begin of a document, near the middle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core_attention.host_copies import on_host
from trainer_client.integrations.frameworks import UnsupportedSetting
from trainer_client.integrations.graphs import outside_graphs
from trainer_client.integrations.torchtitan.attention import is_validation
from trainer_client.step.lane import in_nano_batch, require_step
from trainer_client.step.ping_pong import Call, run_in_turns

Output = Any
"""Of a decoder: a tensor ``[B, L, ...]``, or a list of them with multi-token prediction."""


@dataclass(frozen=True)
class Cut:
    """A nano-batch: rows ``[begin, end)`` of a batch, flattened, and a document of padding after
    them whose outputs are dropped.

    Attributes:
        padding: tokens of it; 0 if there is none.
    """

    begin: int
    end: int
    padding: int = 0


def cut(positions: torch.Tensor, n_lanes: int, multiple: int) -> list[Cut]:
    """Cuts a batch; both halves have whole documents, and as equally many rows as that allows.

    Args:
        positions: ``[B, L]``, 0 where a document begins.
        n_lanes: 1, or 2 for ping-pong.
        multiple: what the rows of a half must be divided by, without rest (sequence parallelism).
            A half without a document has so many tokens of padding: models run no empty batch.
    """
    rows = positions.numel()
    if n_lanes == 1:
        return [Cut(0, rows)]
    begins = (on_host(positions.flatten()) == 0).nonzero().flatten().tolist()
    middle = min([begin for begin in begins if begin] or [rows], key=lambda at: abs(2 * at - rows))
    return [
        Cut(begin, end, -(end - begin) % multiple or (0 if end > begin else multiple))
        for begin, end in ((0, middle), (middle, rows))
    ]


def padded(tensor: torch.Tensor, part: Cut, *, count: bool) -> torch.Tensor:
    """A nano-batch ``[1, rows + padding]`` of ``tensor`` ``[B, L]``; padding is 0, or counts up."""
    flat = tensor.flatten()[part.begin : part.end]
    tail = torch.arange(part.padding, device=flat.device, dtype=flat.dtype)
    return torch.cat([flat, tail if count else torch.zeros_like(tail)])[None]


class InTurns:
    """A model's forward, run for each nano-batch of a batch.

    Args:
        model: a decoder of torchtitan; its ``forward`` is replaced on the object, so that what
            wraps or shards it stays around it.
        n_lanes: nano-batches of a batch.
        multiple: see :func:`cut`.

    Attributes:
        microbatch: the number of the batch in its step.
    """

    def __init__(self, model: Any, n_lanes: int, multiple: int) -> None:
        self._model, self._n_lanes, self._multiple = model, n_lanes, multiple
        self._forward: Callable[..., Output] = model.forward
        self.microbatch = 0
        model.forward = self.run

    @outside_graphs
    def run(self, tokens: torch.Tensor, **kwargs: Any) -> Output:
        """The model's output for ``tokens`` ``[B, L]``; of validation, which nobody has planned, at
        once.

        Raises:
            UnsupportedSetting: the model has inputs that cannot be cut.
        """
        if is_validation():
            return self._forward(tokens, **kwargs)
        first = self.microbatch * self._n_lanes
        if self._n_lanes == 1:
            with in_nano_batch(first):
                output = self._forward(tokens, **kwargs)
            require_step().lane_returned(first)
            return output
        if others := sorted(set(kwargs) - {"positions", "attention_masks"}):
            raise UnsupportedSetting(
                f"the model is called with {', '.join(others)}, which cannot be cut into the two "
                "halves of a batch; set --distca.no-ping_pong"
            )
        positions = kwargs["positions"]
        cuts = cut(positions, self._n_lanes, self._multiple)
        calls = [self._call(tokens, positions, each) for each in cuts]
        outputs = run_in_turns(self._forward, calls, first, is_last=True)
        return _joined(outputs, cuts, tokens.shape)

    def _call(self, tokens: torch.Tensor, positions: torch.Tensor, part: Cut) -> Call:
        own = padded(positions, part, count=True)
        masks = self._model.get_attention_masks(positions=own)
        named = {"positions": own, "attention_masks": masks}
        return (padded(tokens, part, count=False),), named


def _joined(outputs: Sequence[Output], cuts: Sequence[Cut], shape: Sequence[int]) -> Output:
    """``[B, L, ...]`` without padding; a list of them if the model's outputs are lists."""
    if not all(isinstance(output, torch.Tensor) for output in outputs):
        return [_joined(each, cuts, shape) for each in zip(*outputs, strict=True)]
    rows = [output[:, : each.end - each.begin] for output, each in zip(outputs, cuts, strict=True)]
    whole = torch.cat(rows, dim=1)
    return whole.reshape(*shape, *whole.shape[2:])
