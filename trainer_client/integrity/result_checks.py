"""NaN and Inf in a server's result: found as it arrives, and laid at the right door.

A result that is not finite although everything that went into it was, and that is finite when it is
computed at home, is the server's fault: the tick runs again elsewhere, and the step never sees it.
If the model itself produced the NaN, or gradients so large that they overflow, the result is passed
on as it is, with a warning: a trainer may know what to do about it.

The check is one sum per tensor: a sum is finite only if every term is. Only where it is not are the
rows looked at. float16 gradients are not checked, since loss scaling makes them overflow on
purpose.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from core_attention.arrays import exclusive_cumsum, frozen, runs_to_rows
from core_attention.ca_task import Phase
from core_attention.host_copies import on_device
from core_attention.kernels.launcher import LauncherError
from core_attention.kernels.own import own_kernel, shape_of
from core_attention.kernels.protocol import BackwardPart, ForwardPart, TaskBatch
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
        scale: multiplies q.k before the softmax.
    """

    def __init__(self, device: torch.device, *, scale: float) -> None:
        self._scale = scale
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._blamed: set[tuple[Tick, int]] = set()
        self._warned_step = -1

    def fault(self, answer: Answer) -> str | None:
        """The fault of the server in ``answer``, in words; None if nothing is.

        Rows of this rank alone show whose fault it is: they are computed at home once more. Where
        other ranks' rows or several documents went into the result, or it cannot be computed here,
        nobody knows. Then
        the server is blamed once: if another one computes the same, the rows were at fault.
        """
        if answer.tick.phase is Phase.BACKWARD and answer.results["dq"].dtype == torch.float16:
            return None
        with torch.cuda.stream(self._stream):
            bad = None if _all_finite(answer.results) else first_bad_row(answer)
            if bad is None:
                return None
            documents = answer.readers(bad.document) if bad.name in _OF_KEYS else [bad.document]
            if not all(_all_finite(answer.inputs_of(document)) for document in documents):
                acquitted = True
            elif len(documents) == 1 and (found := self._at_home(answer, bad.document)) is not None:
                acquitted = not _all_finite(found)
            else:
                acquitted = (answer.tick, bad.document) in self._blamed
        if acquitted:
            self._warn(answer.tick, bad)
            return None
        self._remember(answer.tick, bad.document)
        return f"{bad.name} is not finite in {bad.where}, though what was sent is"

    def _at_home(self, answer: Answer, document: int) -> Tensors | None:
        """The results that the server was to compute of ``document``; None if that cannot be found
        out here."""
        if answer.spans_ranks(document):
            return None
        try:
            return _compute(answer, document, self._scale)
        except (ValueError, LauncherError, torch.OutOfMemoryError) as error:
            logger.debug("%s: it cannot be computed here: %s", answer.tick, error)
            return None

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
        behind = row - route.kv_position
        run = int(np.flatnonzero((behind >= 0) & (behind < route.kv_length))[0])
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


def _compute(answer: Answer, document: int, scale: float) -> Tensors:
    """The results that the server was to compute of a document that lies on this rank alone, by the
    process's own kernel. Gradients may overflow although all that they are made of is finite; the
    tasks are the server's, as another sum of parts may overflow elsewhere.

    Raises:
        ValueError: no kernel runs this here.
    """
    tasks, route, inputs = answer.plan.tasks(answer.tick.phase), answer.route, answer.inputs
    its = np.flatnonzero(tasks.document[route.task] == document)
    length, task = route.q_length[its], route.task[its]
    k_end = tasks.k_end(answer.plan.manifest)[task]
    key_rows = answer.key_rows(document, int(k_end.max(initial=0)))
    assert key_rows is not None
    device = inputs["q"].device
    queries = on_device(torch.from_numpy(runs_to_rows(route.q_row[its], length)), device)
    keys = on_device(torch.from_numpy(key_rows), device)
    rows = {
        name: tensor[keys if name in ("k", "v") else queries] for name, tensor in inputs.items()
    }
    begin, zeros = exclusive_cumsum(length), np.zeros(len(its), dtype=np.int64)
    batch = TaskBatch(
        frozen(begin), frozen(begin + length), frozen(zeros), frozen(k_end), frozen(zeros)
    )
    kernel, lock = own_kernel(device)
    kernel.check(shape_of(rows["q"], rows["k"], rows["v"]), answer.rule)
    of_rows = (rows["q"], rows["k"], rows["v"])
    with lock:
        if answer.tick.phase is Phase.FORWARD:
            o = rows["v"].new_empty((len(queries), rows["q"].shape[1], rows["v"].shape[2]))
            lse = o.new_empty(o.shape[:2], dtype=torch.float32)
            kernel.forward([ForwardPart(*of_rows, o, lse, batch)], scale, answer.rule)
            found = {"o": o, "lse": lse}
        else:
            dq = torch.empty_like(rows["q"])
            dk, dv = (torch.zeros_like(rows[name], dtype=torch.float32) for name in ("k", "v"))
            of_outputs = (rows["do"], rows["lse"], rows["delta"])
            part = BackwardPart(*of_rows, *of_outputs, dq, dk, dv, batch)
            kernel.backward([part], scale, answer.rule)
            found = {"dq": dq, "dk": dk, "dv": dv}
    return {name: tensor.to(answer.results[name].dtype) for name, tensor in found.items()}
