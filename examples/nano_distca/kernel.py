"""The kernel: a CA-task forward and backward, in the formulas of FlashAttention.

    S = scale Q K^T, causal     L = logsumexp S     P = exp(S - L)     O = P V
    delta = rowsum(dO * O)      dV = P^T dO         dS = P * (dO V^T - delta)
    dQ = scale dS K             dK = scale dS^T Q

In blocks of queries with the keys up to the end of the block: so time follows pairs, and nothing
above the diagonal is computed but inside a block. Query head h reads key head h // group.
"""

from collections.abc import Iterator

import torch

from examples.nano_distca.route import Rows
from examples.nano_distca.tasks import Task

BLOCK = 64


def forward(task: Task, first: int, given: Rows, result: Rows) -> None:
    """Computes ``o`` and ``lse`` of the task's rows; its document begins at row ``first``."""
    for queries, keys, future in _blocks(task, first):
        k, v = given["k"][keys], given["v"][keys]
        scores = _scores(_grouped(given["q"][queries], k), k, future)
        lse = scores.logsumexp(-1)
        o = torch.einsum("qhgk,khd->qhgd", (scores - lse[..., None]).exp(), v)
        result["o"][queries], result["lse"][queries] = o.flatten(1, 2), lse.flatten(1)


def backward(task: Task, first: int, given: Rows, result: Rows) -> None:
    """Computes ``dq`` of the task's rows; adds what it gives to ``dk`` and ``dv``."""
    for queries, keys, future in _blocks(task, first):
        k, v = given["k"][keys], given["v"][keys]
        q, do = (_grouped(given[name][queries], k) for name in ("q", "do"))
        lse, delta = (_grouped(given[name][queries], k)[..., None] for name in ("lse", "delta"))
        p = (_scores(q, k, future) - lse).exp()
        ds = p * (torch.einsum("qhgd,khd->qhgk", do, v) - delta) * q.shape[-1] ** -0.5
        result["dq"][queries] = torch.einsum("qhgk,khd->qhgd", ds, k).flatten(1, 2)
        result["dk"][keys] += torch.einsum("qhgk,qhgd->khd", ds, q)
        result["dv"][keys] += torch.einsum("qhgk,qhgd->khd", p, do)


def _blocks(task: Task, first: int) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Rows of queries and keys, and ``[queries, keys]``: whether a key comes after a query."""
    for begin in range(task.q_begin, task.q_end, BLOCK):
        end = min(begin + BLOCK, task.q_end)
        future = torch.arange(end) > torch.arange(begin, end)[:, None]
        yield slice(first + begin, first + end), slice(first, first + end), future


def _grouped(rows: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """``[rows, heads_kv, group, ...]``."""
    return rows.view(len(rows), k.shape[1], -1, *rows.shape[2:])


def _scores(q: torch.Tensor, k: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
    scores: torch.Tensor = torch.einsum("qhgd,khd->qhgk", q, k) * q.shape[-1] ** -0.5
    return scores.masked_fill(future[:, None, None], -torch.inf)
