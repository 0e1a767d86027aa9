"""Audits: a share of the tasks that servers run is recomputed at home and compared.

What an audit finds has already been used in its step: it names the server, so that it serves no
further step, and the step, so that a user can go back to a checkpoint before it.

Tasks and rows are drawn when the answer is here, from a generator that nobody else can foresee: a
server cannot compute what is audited rightly and the rest as it likes. Of a task, at most ``ROWS``
query rows are recomputed, and as many key rows of its document's gradients: every row of a result
depends on its own query (or key) and not on its neighbours', so a server that computes a share of
them wrongly is found within a few tasks, at a cost that does not grow with the square of the
document. Tasks whose keys are not all at home on the rank cannot be recomputed there; neither can
key gradients to which other ranks' queries contribute.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from core_attention.arrays import Int64Array
from core_attention.ca_task import Phase
from core_attention.host_copies import on_device, on_host
from core_attention.tick import Tick
from distca.contract.timeouts import default_seconds
from trainer_client.errors import ChangedInPlace
from trainer_client.hooks.input_versions import Unwritten
from trainer_client.integrity.answer import Answer, Tensors
from trainer_client.integrity.recompute import (
    Expected,
    forward_rows,
    key_gradient_rows,
    query_gradient_rows,
)

logger = logging.getLogger(__name__)

ROWS = 16
"""Query rows, and key rows, that are recomputed of one task."""

WAITING = 8
"""Samples that may wait. Each keeps the inputs of its tick alive."""

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1.6e-2, torch.float16: 4e-3}
"""Allowed difference, relative to the sum of the absolute values of the terms behind an element.

float32: scores are sums of a few hundred products, each rounded to 6e-8, and their error becomes
the relative error of a weight: 1e-5 in practice; ten times that is allowed. bfloat16 and float16:
the weights, their gradients and the result are rounded to 8 and 11 bits (2e-3 and 5e-4 at most);
eight roundings are allowed.
"""


@dataclass(frozen=True, kw_only=True)
class AuditFinding:
    """The outcome of the audit of one task.

    Attributes:
        server_id: who ran it.
        tick: when.
        epoch: of the plan.
        where: document and queries, in words.
        difference: the largest, in units of what is allowed; more than 1 is wrong.
        name: of the tensor in which it is.
    """

    server_id: str
    tick: Tick
    epoch: int
    where: str
    difference: float
    name: str

    @property
    def equal(self) -> bool:
        return self.difference <= 1.0

    def __str__(self) -> str:
        return (
            f"audit of {self.tick}, {self.where}: {self.name} of server {self.server_id} differs "
            f"from its recomputation by {self.difference:.3g} times what rounding explains"
        )


@dataclass(frozen=True, eq=False)
class Sample:
    """A task to recompute, with what the server gave for some of its rows.

    Attributes:
        answer: where it comes from; its results are not read any more, their memory is reused.
        document: index in the plan's manifest.
        q_begin, q_end: of the task.
        key_rows: packed rows of all keys that its queries see.
        queries: positions of the chosen queries.
        query_rows: their packed rows.
        keys: positions of the chosen keys; empty if their gradients cannot be recomputed.
        given: the server's results for the chosen rows, copied.
        inputs: of the answer, watched.
    """

    answer: Answer
    document: int
    q_begin: int
    q_end: int
    key_rows: Int64Array
    queries: Int64Array
    query_rows: Int64Array
    keys: Int64Array
    given: Tensors
    inputs: Unwritten


class Auditor:
    """Recomputes sampled tasks on a thread of its own.

    Args:
        rate: share of the tasks to audit, 0 to 1.
        scale: multiplies q.k before softmax.
        on_finding: called on the auditor's thread with the outcome of each audit.
        device: of the model's tensors; on a GPU, rows are copied to the host on a stream of their
            own, so that copies do not wait for the model's kernels.
    """

    def __init__(
        self,
        rate: float,
        *,
        scale: float,
        on_finding: Callable[[AuditFinding], None],
        device: torch.device,
    ) -> None:
        self._rate = rate
        self._random = np.random.default_rng(secrets.randbits(128))
        self._scale = scale
        self._on_finding = on_finding
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waiting: queue.Queue[Sample | None] = queue.Queue(WAITING)
        self._skipped = 0
        self._thread = threading.Thread(target=self._run, name="distca-audit", daemon=True)
        self._thread.start()

    @property
    def skipped(self) -> int:
        """Tasks that were chosen and not judged: too many were waiting, or the model has written to
        what was sent."""
        return self._skipped

    def sample(self, answer: Answer) -> None:
        """Chooses tasks of ``answer`` and copies what is needed of its results; never blocks."""
        with torch.cuda.stream(self._stream):
            for sample in self.choose(answer):
                try:
                    self._waiting.put_nowait(sample)
                except queue.Full:
                    if self._skipped == 0:
                        logger.warning("audits fall behind and are skipped; lower the rate")
                    self._skipped += 1

    def close(self, timeout_seconds: float = default_seconds("close_seconds")) -> None:
        """Ends the thread when it has recomputed what waits, or is left to the process's end."""
        deadline = time.monotonic() + timeout_seconds
        try:
            self._waiting.put(None, timeout=timeout_seconds)
        except queue.Full:
            logger.warning("closing with audits unfinished")
            return
        self._thread.join(max(deadline - time.monotonic(), 0.0))

    def choose(self, answer: Answer) -> Iterator[Sample]:
        """The tasks to recompute of ``answer``, in random order: where audits fall behind, the last
        ones are skipped."""
        route, tasks = answer.route, answer.plan.tasks(answer.tick.phase)
        chosen = np.flatnonzero(self._random.random(len(route.task)) < self._rate)
        inputs = Unwritten(answer.tick, answer.inputs)
        k_ends = tasks.k_end(answer.plan.manifest)
        for run in self._random.permutation(chosen).tolist():
            task = int(route.task[run])
            document, q_begin, q_end = (
                int(column[task]) for column in (tasks.document, tasks.q_begin, tasks.q_end)
            )
            k_end = int(k_ends[task])
            key_rows = answer.key_rows(document, k_end)
            if key_rows is None:
                continue
            queries = self._some(q_begin, q_end)
            offsets = queries - q_begin
            at_home = all(_all_queries_at_home(answer, each) for each in answer.readers(document))
            keys = self._some(0, k_end) if at_home else np.zeros(0, np.int64)
            yield Sample(
                answer=answer,
                document=document,
                q_begin=q_begin,
                q_end=q_end,
                key_rows=key_rows,
                queries=queries,
                query_rows=int(route.q_row[run]) + offsets,
                keys=keys,
                given=_copy_results(answer, int(route.q_position[run]) + offsets, document, keys),
                inputs=inputs,
            )

    def _some(self, begin: int, end: int) -> Int64Array:
        """At most ROWS different numbers of ``[begin, end)``, in order."""
        n_rows = min(ROWS, end - begin)
        # Drawn with replacement, so that a long range need not be listed.
        drawn = np.arange(begin, end) if n_rows < ROWS else self._random.integers(begin, end, ROWS)
        return np.unique(drawn).astype(np.int64)

    def _run(self) -> None:
        with torch.no_grad(), torch.cuda.stream(self._stream):
            while (sample := self._waiting.get()) is not None:
                try:
                    finding = self._audit(sample)
                    sample.inputs.get()
                    self._on_finding(finding)
                except ChangedInPlace:
                    self._skipped += 1
                except Exception:
                    logger.exception("the audit of a task of %s failed", sample.answer.tick)
                # Not kept while the thread waits for the next one.
                del sample

    def _audit(self, sample: Sample) -> AuditFinding:
        answer = sample.answer
        tolerance = TOLERANCES[answer.inputs["q"].dtype]
        worst, name = 0.0, ""
        for result, expected in self._recompute(sample).items():
            difference = (sample.given[result].float() - expected.value).abs()
            allowed = tolerance * expected.magnitude + torch.finfo(torch.float32).tiny
            largest = float((difference / allowed).nan_to_num(nan=torch.inf).max())
            if largest > worst:
                worst, name = largest, result
        document_id = answer.plan.manifest.document_id[sample.document]
        return AuditFinding(
            server_id=answer.server_id,
            tick=answer.tick,
            epoch=answer.plan.epoch,
            where=f"document {document_id}, task [{sample.q_begin}, {sample.q_end})",
            difference=worst,
            name=name,
        )

    def _recompute(self, sample: Sample) -> dict[str, Expected]:
        answer, positions = sample.answer, torch.from_numpy(sample.queries)
        k, v = (_rows(answer.inputs[name], sample.key_rows) for name in ("k", "v"))
        if answer.tick.phase is Phase.FORWARD:
            q = _rows(answer.inputs["q"], sample.query_rows)
            return forward_rows(q, k, v, positions, self._scale, answer.rule)
        expected = query_gradient_rows(
            _queries(answer, sample.query_rows), k, v, positions, self._scale, answer.rule
        )
        if len(sample.keys):
            expected |= self._key_gradients(sample, k, v)
        return expected

    def _key_gradients(
        self, sample: Sample, k: torch.Tensor, v: torch.Tensor
    ) -> dict[str, Expected]:
        """dk and dv of the chosen keys, sums over the documents that read them."""
        keys, sums = torch.from_numpy(sample.keys), {}
        for name, rows in (("dk", k), ("dv", v)):
            zeros = torch.zeros_like(rows[keys], dtype=torch.float32)
            sums[name] = Expected(zeros, zeros.clone())
        for document, end in sample.answer.readers(sample.document).items():
            at = keys[keys < end]
            query_rows, positions = _queries_of_server(sample.answer, document)
            found = key_gradient_rows(
                _queries(sample.answer, query_rows),
                k[at],
                v[at],
                torch.from_numpy(positions),
                at,
                self._scale,
                sample.answer.rule,
            )
            for name, expected in found.items():
                sums[name].value[: len(at)] += expected.value
                sums[name].magnitude[: len(at)] += expected.magnitude
        return sums


def _copy_results(
    answer: Answer, q_rows: Int64Array, document: int, keys: Int64Array
) -> dict[str, torch.Tensor]:
    """The results of some rows, by row of the route: queries, and keys of a document."""
    names = ("o", "lse") if answer.tick.phase is Phase.FORWARD else ("dq",)
    given = {name: _rows(answer.results[name], q_rows) for name in names}
    if answer.tick.phase is Phase.BACKWARD and len(keys):
        route = answer.route
        runs = np.flatnonzero(route.kv_document == document)
        run = runs[np.searchsorted(route.kv_offset[runs], keys, side="right") - 1]
        rows = route.kv_position[run] + keys - route.kv_offset[run]
        given |= {name: _rows(answer.results[name], rows) for name in ("dk", "dv")}
    return given


def _all_queries_at_home(answer: Answer, document: int) -> bool:
    """Return whether all queries of ``document`` that the server has are this rank's."""
    tasks, route = answer.plan.tasks(answer.tick.phase), answer.route
    on_server = (tasks.document == document) & (tasks.server == route.server)
    return int(on_server.sum()) == int((tasks.document[route.task] == document).sum())


def _queries_of_server(answer: Answer, document: int) -> tuple[Int64Array, Int64Array]:
    """Packed rows and positions of this rank's queries of ``document`` on the server."""
    tasks, route = answer.plan.tasks(answer.tick.phase), answer.route
    runs = np.flatnonzero(tasks.document[route.task] == document)
    steps = [np.arange(length) for length in route.q_length[runs]]
    begins = tasks.q_begin[route.task[runs]]
    rows = np.concatenate([r + s for r, s in zip(route.q_row[runs], steps, strict=True)])
    positions = np.concatenate([b + s for b, s in zip(begins, steps, strict=True)])
    return rows, positions


def _queries(answer: Answer, rows: Int64Array) -> dict[str, torch.Tensor]:
    return {name: _rows(answer.inputs[name], rows) for name in ("q", "do", "lse", "delta")}


def _rows(tensor: torch.Tensor, rows: Int64Array) -> torch.Tensor:
    """A copy of some rows, on the host."""
    return on_host(tensor.detach()[on_device(torch.from_numpy(rows), tensor.device)])
