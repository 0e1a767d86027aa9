"""NaN and Inf in a server's result: found as it arrives, and laid at the right door.

A result that is not finite although everything that went into it was, is the server's fault: the
tick runs again elsewhere, and the step never sees it. If the model itself produced the NaN, the
result is passed on as it is, with a warning: a trainer may know what to do about it.

The check is one sum per tensor: a sum is finite only if every term is. Only where it is not are the
rows looked at. float16 gradients are not checked, since loss scaling makes them overflow on
purpose.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from core_attention.ca_task import Phase
from core_attention.tick import Tick
from trainer_client.integrity.answer import Answer, Tensors

logger = logging.getLogger(__name__)

_OF_KEYS = ("dk", "dv")


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """The first row of a result that holds a NaN or Inf.

    Attributes:
        name: of the tensor: o, lse, dq, dk or dv.
        document: index in the plan's manifest.
        where: the document and the row, in words.
    """

    name: str
    document: int
    where: str


class ResultChecker:
    """Checks the results of other processes' servers.

    Args:
        device: of the model's tensors; on a GPU the check runs on a stream of its own, so that it
            does not wait for the model's kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._blamed: set[tuple[Tick, int]] = set()
        self._warned_step = -1

    def fault(self, answer: Answer) -> str | None:
        """What is wrong with ``answer`` by the server's fault, in words; None if nothing is.

        Where other ranks' rows went into the result it cannot be told whose fault it is. Then the
        server is blamed once: if another one computes the same, the rows were at fault.
        """
        if answer.tick.phase is Phase.BACKWARD and answer.results["dq"].dtype == torch.float16:
            return None
        with torch.cuda.stream(self._stream):
            bad = None if _all_finite(answer.results) else first_bad_row(answer)
            if bad is None:
                return None
            model = not _all_finite(answer.inputs_of(bad.document))
        again = (answer.tick, bad.document) in self._blamed
        if model or (again and answer.spans_ranks(bad.document)):
            self._warn(answer.tick, bad)
            return None
        self._remember(answer.tick, bad.document)
        return f"{bad.name} is not finite in {bad.where}, though what was sent is"

    def _remember(self, tick: Tick, document: int) -> None:
        self._blamed = {entry for entry in self._blamed if entry[0].step == tick.step}
        self._blamed.add((tick, document))

    def _warn(self, tick: Tick, bad: BadRow) -> None:
        """Once a step: a model that has diverged is not finite anywhere."""
        if self._warned_step != tick.step:
            self._warned_step = tick.step
            logger.warning(
                "%s: %s is not finite in %s; the model produced it, not the server",
                tick,
                bad.name,
                bad.where,
            )


def first_bad_row(answer: Answer) -> BadRow | None:
    """The first row of ``answer``'s results that is not finite; None if all are (a sum of finite
    terms may overflow)."""
    for name, tensor in answer.results.items():
        bad = ~torch.isfinite(tensor).flatten(1).all(1)
        if bool(bad.any()):
            return _describe(answer, name, int(bad.to(torch.uint8).argmax()))
    return None


def _describe(answer: Answer, name: str, row: int) -> BadRow:
    route, manifest = answer.route, answer.plan.manifest
    if name in _OF_KEYS:
        run = int(np.searchsorted(route.kv_position, row, side="right")) - 1
        document = int(route.kv_document[run])
        position = int(route.kv_offset[run]) + row - int(route.kv_position[run])
        what = f"key {position}"
    else:
        run = int(np.searchsorted(route.q_position, row, side="right")) - 1
        tasks, task = answer.plan.tasks(answer.tick.phase), int(route.task[run])
        document = int(tasks.document[task])
        begin, end = int(tasks.q_begin[task]), int(tasks.q_end[task])
        what = f"query {begin + row - int(route.q_position[run])} of the task [{begin}, {end})"
    return BadRow(
        name=name,
        document=document,
        where=f"document {manifest.document_id[document]}, {what}",
    )


def _all_finite(tensors: Tensors) -> bool:
    sums = [tensor.sum().to(torch.float32) for tensor in tensors.values()]
    return bool(torch.isfinite(torch.stack(sums)).all())
