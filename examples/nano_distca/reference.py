"""The same model with plain attention: each document alone, on one process, in float64.

O = softmax(scale Q K^T + causal mask) V,    gradients by autograd
"""

from collections.abc import Sequence

import torch

from examples.nano_distca.job import Job
from examples.nano_distca.lanes import project, rest


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """o of packed documents, all ``[rows, heads or heads_kv, head_dim]``."""
    group = q.shape[1] // k.shape[1]
    outputs = []
    for rows in zip(*(torch.split(each, list(lengths)) for each in (q, k, v)), strict=True):
        own_q, own_k, own_v = rows[0], *(each.repeat_interleave(group, 1) for each in rows[1:])
        scores = torch.einsum("qhd,khd->hqk", own_q, own_k) * q.shape[-1] ** -0.5
        future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, own_v))
    return torch.cat(outputs)


def reference(job: Job) -> dict[str, torch.Tensor]:
    """Gradients as :func:`examples.nano_distca.job.run` names them."""
    weights = {name: w.double().requires_grad_() for name, w in job.weights.items()}
    inputs = [x.double().requires_grad_() for x in job.x]
    for lane, x, dy in zip(job.lanes, inputs, job.dy, strict=True):
        if not lane.lengths:
            continue
        for layer in range(len(weights["qkv"])):
            q, k, v = project(x, weights, layer, job.cost.shape)
            o = plain_attention(q, k, v, lane.lengths)
            x = rest(x, o, weights, layer)
        x.backward(dy.double())
    leaves = weights | {f"x{lane}": x for lane, x in enumerate(inputs)}
    return {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items()}


def deviation(mine: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest difference of any gradient, relative to the gradient's largest element."""
    return max(
        float((mine[n] - g).abs().max() / g.abs().max()) for n, g in right.items() if g.numel()
    )
