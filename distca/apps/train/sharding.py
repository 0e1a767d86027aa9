"""Sharded weights: FSDP2 (``fully_shard``) around a model through which nano-batches interleave."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer_client import prepare_fsdp


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, gathered from all ranks if it is sharded; then all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_model(
    model: nn.Module,
    layers: list[nn.Module],
    *,
    n_ranks: int,
    device: torch.device,
    compute_dtype: torch.dtype,
) -> nn.Module:
    """Shards each layer of ``model``, and the rest of it, over all ranks, in place.

    Args:
        model: runs all nano-batches of a step in one call.
        layers: of it, in the order of a forward pass.
        n_ranks: all ranks.
        device: of this rank.
        compute_dtype: of gathered weights and activations; gradients are reduced in float32.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (n_ranks,))
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
    sharded: list[Any] = [
        # The backward pass needs the last one's weights first: they stay gathered.
        shard(layer, reshard_after_forward=layer is not layers[-1])
        for layer in layers
    ]
    root: Any = shard(model, reshard_after_forward=False)
    for before, after in itertools.pairwise(sharded):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    prepare_fsdp(root)
    return cast(nn.Module, root)
