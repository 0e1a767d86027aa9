"""Sharded weights: FSDP2 (``fully_shard``) around a model through which nano-batches interleave.

FSDP2 frees a layer's gathered weights, and reduces its gradients, when a forward or backward leaves
the layer. Under ping-pong the first nano-batch to leave would free weights that the second still
needs, and every nano-batch would reduce gradients of its own. So both wait for the last one:

* forward: FSDP2 is told not to reshard; the layer is resharded when all nano-batches have left it;
* backward: FSDP2 learns of the first nano-batch only that it leaves. That one is the last to leave,
  since autograd mirrors the forward pass (``trainer_client.operation``), and by then autograd has
  summed the gradients of all.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from distca.train.host_barriers import HostBarriers
from distca.train.layers import LaneGate


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, gathered from all ranks if it is sharded; then all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class ShardedModel:
    """A model whose layers, and the rest, are each sharded over all ranks.

    Args:
        model: runs all nano-batches of a step in one call; its parameters are sharded in place.
        layers: of it, in the order of a forward pass.
        n_lanes: nano-batches of a step.
        device_type: ``"cpu"`` or ``"cuda"``.
        n_ranks: of the default process group.
        compute_dtype: of gathered weights and activations; gradients are reduced in float32.
        barriers: met before each collective; None: collectives are launched as soon as they can.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[nn.Module],
        n_lanes: int,
        *,
        device_type: str,
        n_ranks: int,
        compute_dtype: torch.dtype,
        barriers: HostBarriers | None = None,
    ) -> None:
        mesh = init_device_mesh(device_type, (n_ranks,))
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
        self._lanes: list[LaneGate] = []
        sharded: list[FSDPModule] = []
        for index, layer in enumerate(layers):
            last = index == len(layers) - 1
            self._lanes.append(_gate_lanes(shard(layer), n_lanes, keeps_gathered=last))
            sharded.append(layer)  # type: ignore[arg-type]  # fully_shard has changed its class
        self.module: Any = shard(model, reshard_after_forward=False)
        for before, after in itertools.pairwise(sharded):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        if barriers is not None:
            for each in (*sharded, self.module):
                barriers.guard_sharded(each)

    def begin_step(self) -> None:
        """Forgets what a step that was given up has left."""
        for lanes in self._lanes:
            lanes.begin_step()


def _gate_lanes(layer: Any, n_lanes: int, *, keeps_gathered: bool) -> LaneGate:
    """Has a sharded layer free its weights and reduce its gradients with the last nano-batch.

    Args:
        layer: after ``fully_shard``.
        n_lanes: nano-batches of a step.
        keeps_gathered: its weights stay gathered between forward and backward, which need them
            one after the other.
    """
    layer.set_reshard_after_forward(False, recurse=False)

    def left_forward() -> None:
        if not keeps_gathered:
            layer.reshard()

    return LaneGate(layer, n_lanes, left_forward=left_forward)
