"""Comparison of what a model hands over about its documents with what was planned."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from core_attention.arrays import runs_to_rows
from core_attention.host_copies import HostCopy
from trainer_client.step.lane import Lane
from trainer_client.step.running_step import RunningStep

CHECKED = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
"""Arguments of models that show the documents."""


class Documents:
    """The documents of one nano-batch, as far as this rank holds them.

    Args:
        where: names the nano-batch in errors.
        segments: (packed row, offset in its document, length) of each segment, by row.

    Attributes:
        shown: names of what was handed over and shows these documents.
    """

    def __init__(self, where: str, segments: Sequence[tuple[int, int, int]]) -> None:
        self.where = where
        self.segments = tuple(segments)
        self.shown: set[str] = set()
        # Layers hand over the same tensors. Kept, so that an id stays its tensor's own.
        self._seen: dict[int, torch.Tensor] = {}
        self._copies: deque[tuple[str, HostCopy]] = deque()

    @property
    def lengths(self) -> list[int]:
        """Rows of each segment."""
        return [length for _, _, length in self.segments]

    @property
    def is_one_from_its_start(self) -> bool:
        """Return whether all rows are one document's, from its first token on (or there are
        none)."""
        return [offset for _, offset, _ in self.segments] in ([], [0])

    @property
    def tell_masks_apart(self) -> bool:
        """Return whether any segment has several rows, of which masks can be asked: in one row,
        also of a longer document, what a causal mask shows is what any other does."""
        return max(self.lengths, default=0) > 1

    @cached_property
    def longest(self) -> int:
        """Keys that the last query of any segment sees: what a window must not be shorter than."""
        return max((offset + length for _, offset, length in self.segments), default=0)

    @cached_property
    def positions(self) -> torch.Tensor:
        """``[rows]`` each packed row's position in its document, int64."""
        held = np.array(self.segments, dtype=np.int64).reshape(-1, 3)
        return torch.from_numpy(runs_to_rows(held[:, 1], held[:, 2]))

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Compares those of ``arguments`` that show documents, once they are on the host: the
        thread does not wait for its GPU. What is not there yet is compared in a later call, at the
        latest in :meth:`check_all`.
        """
        for name in CHECKED:
            tensor = arguments.get(name)
            if tensor is None:
                continue
            if id(tensor) not in self._seen:
                self._check_shape(name, tensor)
                self._copies.append((name, HostCopy(tensor.flatten())))
                self._seen[id(tensor)] = tensor
            self.shown.add(name)
        while self._copies and self._copies[0][1].is_done:
            self._compare_next()

    def check_all(self) -> None:
        """Compares what has not been compared yet."""

        while self._copies:
            self._compare_next()

    def _compare_next(self) -> None:
        name, copy = self._copies.popleft()
        compare = {"position_ids": self._position_ids, "seq_idx": self._seq_idx}
        try:
            compare.get(name, self._cu_seq_lens)(name, copy.wait())
        except ValueError:
            # Whoever catches it and hands over the same again gets it again.
            self._seen.clear()
            self._copies.clear()
            raise

    def _check_shape(self, name: str, tensor: torch.Tensor) -> None:
        n_rows = sum(self.lengths)
        if name == "position_ids" and (tensor.dim() > 2 or tensor.numel() != n_rows):
            raise ValueError(
                f"{self.where}: {name} have shape {tuple(tensor.shape)}, the manifest {n_rows} "
                "rows; pack the documents of a nano-batch into one row [1, rows]"
            )
        if name == "seq_idx" and tensor.numel() != n_rows:
            raise ValueError(
                f"{self.where}: {name} has shape {tuple(tensor.shape)}, the manifest {n_rows} rows"
            )

    def _position_ids(self, name: str, found: torch.Tensor) -> None:
        expected = self.positions
        wrong = (found != expected).nonzero()
        if wrong.numel():
            at = int(wrong[0])
            raise ValueError(
                f"{self.where}: {name} say {int(found[at])} at row {at}, the manifest "
                f"{int(expected[at])}; submit the manifest of the batch that is run"
            )

    def _cu_seq_lens(self, name: str, cumulative: torch.Tensor) -> None:
        found = cumulative.diff().tolist()
        if found != self.lengths:
            raise ValueError(
                f"{self.where}: {name} tell of lengths {found[:8]}..., the manifest of "
                f"{self.lengths[:8]}...; submit the manifest of the batch that is run"
            )

    def _seq_idx(self, name: str, index: torch.Tensor) -> None:
        begins = (index.diff() != 0).nonzero().flatten() + 1
        found = [0, *begins.tolist()] if len(index) else []
        expected = [row for row, _, _ in self.segments]
        if found != expected:
            raise ValueError(
                f"{self.where}: {name} has documents begin at rows {found[:8]}..., the manifest at "
                f"{expected[:8]}...; submit the manifest of the batch that is run"
            )


def documents_of(lane: Lane) -> Documents:
    """The documents of a lane; the same object for the whole of its step."""
    if (given := of_forwards.get(lane)) is not None:
        return given
    of_step = _of_steps.setdefault(lane.running, {})
    if lane.nano_batch not in of_step:
        documents = of_step[lane.nano_batch] = Documents(
            f"step {lane.running.step} nano-batch {lane.nano_batch}",
            lane.running.segments(lane.nano_batch),
        )
        lane.running.check_at_end(documents.check_all)
    return of_step[lane.nano_batch]


of_forwards: WeakKeyDictionary[Lane, Documents] = WeakKeyDictionary()
"""Those that a forward has come with; its step may not have begun."""

_of_steps: WeakKeyDictionary[RunningStep, dict[int, Documents]] = WeakKeyDictionary()
