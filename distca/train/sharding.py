"""Sharded weights: FSDP2 (``fully_shard``) around a model through which nano-batches interleave."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer_client import prepare_fsdp


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, gathered from all ranks if it is sharded; then all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """``parameters`` in groups that one operation may take together: those on one mesh, and those
    that are on none."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


def squared_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Of the gradients of ``parameters``, each as a whole; all ranks that share one call it."""
    return sum(
        float(whole(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]))) ** 2
        for group in by_mesh(p for p in parameters if p.grad is not None)
    )


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, most: float) -> None:
    """Scales the gradients of ``parameters``, whose norm is ``norm``, to one of ``most``, if it is
    larger."""
    factor = min(1.0, most / (norm + 1e-6))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


class ShardedModel:
    """A model whose layers, and the rest, are each sharded over the ranks of a mesh.

    Args:
        model: runs all nano-batches of a step in one call; its parameters are sharded in place.
        layers: of it, in the order of a forward pass.
        mesh: of one dimension, over which weights are sharded, or of two: replicas, and those over
            which they are sharded.
        compute_dtype: of gathered weights and activations; gradients are reduced in float32.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[nn.Module],
        *,
        mesh: DeviceMesh,
        compute_dtype: torch.dtype,
    ) -> None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
        sharded: list[Any] = [
            # The backward pass needs the last one's weights first: they stay gathered.
            shard(layer, reshard_after_forward=layer is not layers[-1])
            for layer in layers
        ]
        root: Any = shard(model, reshard_after_forward=False)
        self.module: nn.Module = root
        for before, after in itertools.pairwise(sharded):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        prepare_fsdp(self.module)
