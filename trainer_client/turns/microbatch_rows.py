"""How the tensors of a microbatch hold its nano-batches: each in its row, or all in one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer_client.errors import SessionError
from trainer_client.step.lane import require_step
from trainer_client.step.ping_pong import Call
from trainer_client.turns.containers import filled


@dataclass(frozen=True)
class Cut:
    """Where the tensors of a microbatch are cut into nano-batches.

    Attributes:
        dimension: 0 where each nano-batch is a row, 1 where all are parts of the only row.
        size: of each tensor in it.
        parts: half-open ranges in it, one for each nano-batch that has rows.
        first: how many nano-batches without rows come before them.
    """

    dimension: int
    size: int
    parts: tuple[slice, ...]
    first: int

    def calls(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call]:
        """The arguments of each nano-batch.

        Raises:
            SessionError: a tensor has another shape; names it.
        """
        return [
            (self._part(tuple(args), part, "input"), self._part(dict(kwargs), part, "input"))
            for part in self.parts
        ]

    def joined(self, outputs: list[Any]) -> Any:
        """The outputs of all nano-batches as one.

        Raises:
            SessionError: they are no tensors that can be put together.
        """
        if isinstance(outputs[0], torch.Tensor):
            if outputs[0].ndim <= self.dimension:
                raise SessionError(
                    f"a stage gave a tensor of shape {list(outputs[0].shape)} for a part of a "
                    "packed row; it gives tensors of shape [1, tokens, ...], such as logits or "
                    "the losses of tokens"
                )
            return torch.cat(outputs, dim=self.dimension)
        if isinstance(outputs[0], tuple | list):
            kind = type(outputs[0]) if isinstance(outputs[0], tuple) else tuple
            return filled(kind, map(self.joined, map(list, zip(*outputs, strict=True))))
        raise SessionError(
            f"a stage gave {type(outputs[0]).__name__}; stages give tensors of shape [rows, ...], "
            "or tuples of them"
        )

    def _part(self, value: Any, part: slice, name: str) -> Any:
        """``value`` with one part of each tensor; a number is the same in all parts."""
        if isinstance(value, torch.Tensor):
            if value.ndim == 0:
                return value
            self._check(value, name)
            return value[part] if self.dimension == 0 else part_of_row(value, part)
        if isinstance(value, dict):
            return {key: self._part(each, part, str(key)) for key, each in value.items()}
        if isinstance(value, tuple | list):
            parts = (self._part(each, part, f"{name} {at}") for at, each in enumerate(value))
            return filled(type(value), parts)
        return value

    def _check(self, value: torch.Tensor, name: str) -> None:
        expected = (self.size,) if self.dimension == 0 else (1, self.size)
        if tuple(value.shape[: self.dimension + 1]) == expected:
            return
        if self.dimension == 0:
            raise SessionError(
                f"{name} of a microbatch has shape {list(value.shape)}; its first dimension must "
                f"be the {self.size} nano-batches of a microbatch, since the session was opened "
                f"with n_nano_batches as {self.size} times the schedule's microbatches; or 1, one "
                "packed row of them all"
            )
        raise SessionError(
            f"{name} of a microbatch has shape {list(value.shape)}; the nano-batches that were "
            f"submitted for it have {self.size} tokens: give [1, {self.size}, ...], and equally "
            "many in every step, since PyTorch's stages keep the shapes of the first"
        )


def part_of_row(row: torch.Tensor, part: slice) -> torch.Tensor:
    """``row[:, part]`` of a packed row ``[1, tokens, ...]``, with the strides of a row of its own:
    code that was compiled for one is not compiled again for the other."""
    return row[:, part].squeeze(0).unsqueeze(0)


def cut_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], microbatch: int, n_nano_batches: int
) -> Cut:
    """Where the arguments of a microbatch of the running step are cut.

    Args:
        args, kwargs: of its stage; the first tensor that is no number tells which kind they are of.
        microbatch: its number.
        n_nano_batches: of each microbatch.

    Raises:
        SessionError: no step is running that says how long the parts of a packed row are.
    """
    tensors = _tensors([*args, *kwargs.values()])
    tensor = next((each for each in tensors if each.ndim), None)
    if n_nano_batches == 1 or tensor is None or tensor.ndim < 2 or len(tensor) != 1:
        parts = tuple(slice(i, i + 1) for i in range(n_nano_batches))
        return Cut(0, n_nano_batches, parts, 0)
    running, begin = require_step(), microbatch * n_nano_batches
    n_rows = [running.n_rows(begin + i) for i in range(n_nano_batches)]
    held = [i for i, rows in enumerate(n_rows) if rows] or [0]
    ends = [sum(n_rows[: i + 1]) for i in range(n_nano_batches)]
    # Those without rows run nothing, but for one between two others.
    used = range(held[0], held[-1] + 1)
    parts = tuple(slice(ends[i] - n_rows[i], ends[i]) for i in used)
    return Cut(1, ends[-1], parts, held[0])


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(list(value.values()))
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
