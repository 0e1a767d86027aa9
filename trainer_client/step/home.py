"""Core attention that is computed here: layers with a window or with chunks, and documents that no
server computes while the control plane is away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attention_node.served_job import JobDescription
from core_attention.ca_task import Phase
from core_attention.kernels.own import own_kernel, shape_of
from core_attention.kernels.protocol import BackwardPart, ForwardPart, TaskBatch
from core_attention.kernels.row_dots import row_dots
from core_attention.score_rule import ScoreRule
from core_attention.tensor_checks import check_qkv
from core_attention.tick import Tick
from trainer_client.hooks.compile_boundary import outside_graphs
from trainer_client.hooks.differentiable_once import differentiable_once
from trainer_client.step.handed_over import HandedOver
from trainer_client.step.home_tasks import HomeTasks
from trainer_client.step.replies import Tensors

Keep = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes o and lse for the recomputation of a checkpoint."""


@dataclass(eq=False)
class HomeCall:
    """A call, apart from its rows.

    Attributes:
        tasks: which rows.
        rule: window and softcap.
        scale: multiplies q.k before the softmax.
        taken_over: the keys that are taken over from the nano-batch before, if any are.
        handed_over: the keys that the next nano-batch takes over from this one, if it does.
    """

    tasks: HomeTasks
    rule: ScoreRule
    scale: float
    taken_over: HandedOver | None = None
    handed_over: HandedOver | None = None


def attend_at_home(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    n_rows: int,
    call: HomeCall,
    keep: Keep,
    link: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """o ``[rows, num_heads, head_dim_v]`` and lse ``[rows, num_heads]`` float32, both
    differentiable once, and a link, see :mod:`trainer_client.step.handed_over`.

    Args:
        q: ``[n_rows, num_heads, head_dim]``, contiguous.
        k, v: ``[n_rows, num_heads_kv, head_dim]`` and ``head_dim_v``, likewise.
        n_rows: of the nano-batch, as the manifest says.
        call: what is computed.
        keep: see :data:`Keep`.
        link: of the nano-batch that keys are taken over from.
    """
    shape = shape_of(q, k, v)
    check_qkv(q, k, v, shape, n_rows)
    kernel, _ = own_kernel(q.device)
    kernel.check(shape, call.rule)
    o, lse, link = _AtHome.apply(q, k, v, link, call, keep)  # type: ignore[no-untyped-call]
    return o, lse, link


class _AtHome(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        link: torch.Tensor | None,
        call: HomeCall,
        keep: Keep,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        o = v.new_empty((len(q), q.shape[1], v.shape[2]))
        lse = q.new_empty((len(q), q.shape[1]), dtype=torch.float32)
        kernel, lock = own_kernel(q.device)
        for keys, tasks in _by_keys(call, k, v):
            with lock:
                part = ForwardPart(q, keys["k"], keys["v"], o, lse, tasks)
                kernel.forward([part], call.scale, call.rule)
        keep(o, lse)
        ctx.call, ctx.has_link = call, link is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse, q.new_empty(0, dtype=torch.float32)

    @staticmethod
    @outside_graphs
    @differentiable_once
    def backward(
        ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None, _: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        call: HomeCall = ctx.call
        do, delta = output_gradients(o, do, dlse)
        dq = torch.empty_like(q)
        gradients = _zero_gradients(k, v)
        kernel, lock = own_kernel(q.device)
        for keys, tasks in _by_keys(call, k, v):
            of_keys = gradients if keys["k"] is k else _zero_gradients(keys["k"], keys["v"])
            with lock:
                part = BackwardPart(
                    q,
                    keys["k"],
                    keys["v"],
                    do,
                    lse,
                    delta,
                    dq,
                    of_keys["dk"],
                    of_keys["dv"],
                    tasks,
                )
                kernel.backward([part], call.scale, call.rule)
            if of_keys is not gradients:
                _take_in(call, of_keys, gradients)
        if call.handed_over is not None:
            call.handed_over.add_to(gradients)
        # The operation that has given the link, of the nano-batch before, runs after this one.
        link = dq.new_empty(0, dtype=torch.float32) if ctx.has_link else None
        dk, dv = gradients["dk"].to(k.dtype), gradients["dv"].to(v.dtype)
        return dq, dk, dv, link, None, None


def _by_keys(
    call: HomeCall, k: torch.Tensor, v: torch.Tensor
) -> Iterator[tuple[Tensors, TaskBatch]]:
    """The tasks that there are, with their keys and values: the nano-batch's own, or edge keys."""
    if len(call.tasks.tasks):
        yield {"k": k, "v": v}, call.tasks.tasks
    if len(call.tasks.edge_tasks):
        edge = {name: _edge_rows(call, name, rows) for name, rows in (("k", k), ("v", v))}
        yield edge, call.tasks.edge_tasks


def _edge_rows(call: HomeCall, name: str, own: torch.Tensor) -> torch.Tensor:
    """A copy of the edge keys (``name`` is k), or of their values (v)."""
    runs = call.tasks.edge_keys
    over = iter(
        ()
        if call.taken_over is None
        else call.taken_over.rows[name].split([run.length for run in runs if run.is_carried])
    )
    return torch.cat(
        [next(over) if run.is_carried else own[run.row : run.row + run.length] for run in runs]
    )


def _take_in(call: HomeCall, of_edge: Tensors, gradients: Tensors) -> None:
    """Adds what was found for edge keys to ``gradients`` of the nano-batch's own, and answers the
    nano-batch before with the rest."""
    answer: dict[str, list[torch.Tensor]] = {name: [] for name in of_edge}
    at = 0
    for run in call.tasks.edge_keys:
        for name, rows in of_edge.items():
            found = rows[at : at + run.length]
            if run.is_carried:
                answer[name].append(found)
            else:
                gradients[name][run.row : run.row + run.length] += found
        at += run.length
    if call.taken_over is not None:
        call.taken_over.answer({name: torch.cat(rows) for name, rows in answer.items()})


def _zero_gradients(k: torch.Tensor, v: torch.Tensor) -> Tensors:
    return {
        "dk": torch.zeros_like(k, dtype=torch.float32),
        "dv": torch.zeros_like(v, dtype=torch.float32),
    }


def compute_documents(
    tick: Tick, tasks: TaskBatch, job: JobDescription, inputs: Tensors, outputs: Tensors
) -> None:
    """Compute a tick whose documents are whole on this rank.

    Args:
        tick: which exchange.
        tasks: its documents.
        job: what the job's members agree on.
        inputs: q, k, v, and for backward also do, lse, delta, by packed row.
        outputs: o and lse, or dq, and dk and dv that are added to, by packed row.
    """
    kernel, lock = own_kernel(inputs["q"].device)
    with lock:
        if tick.phase is Phase.FORWARD:
            part = ForwardPart(**inputs, **outputs, tasks=tasks)
            kernel.forward([part], job.scale, job.rule(tick))
        else:
            backward = BackwardPart(**inputs, **outputs, tasks=tasks)
            kernel.backward([backward], job.scale, job.rule(tick))


def output_gradients(
    o: torch.Tensor, do: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs of core attention's backward pass that come of o and lse: the gradient of o,
    contiguous, and delta ``[rows, heads]`` float32, which is rowsum(do * o) - dlse.

    Args:
        o: ``[rows, heads, head_dim_v]``.
        do: its gradient; None is zeros.
        dlse: ``[rows, heads]`` gradient of lse; None is zeros.
    """
    do = torch.zeros_like(o) if do is None else do.contiguous()
    delta = row_dots(do, o)
    return do, delta if dlse is None else delta - dlse
