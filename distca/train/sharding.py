"""Sharded weights: FSDP2 (``fully_shard``) around a model through which nano-batches interleave."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer_client import HostBarriers, prepare_fsdp


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, gathered from all ranks if it is sharded; then all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class ShardedModel:
    """A model whose layers, and the rest, are each sharded over all ranks.

    Args:
        model: runs all nano-batches of a step in one call; its parameters are sharded in place.
        layers: of it, in the order of a forward pass.
        device_type: ``"cpu"`` or ``"cuda"``.
        n_ranks: of the default process group.
        compute_dtype: of gathered weights and activations; gradients are reduced in float32.
        barriers: met before each collective; None: collectives are launched as soon as they can.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[nn.Module],
        *,
        device_type: str,
        n_ranks: int,
        compute_dtype: torch.dtype,
        barriers: HostBarriers | None = None,
    ) -> None:
        mesh = init_device_mesh(device_type, (n_ranks,))
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
        prepare_fsdp(self.module, barriers=barriers)
