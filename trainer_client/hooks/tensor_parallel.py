"""Models under tensor parallelism: DTensor weights on one mesh, local heads in core attention.

``parallelize_module`` of PyTorch and the plans of transformers (``tp_plan``) shard the weights of
projections over a mesh, and give attention plain tensors with the heads of one rank. Heads are
independent, so each rank is a rank of the job of its own, with as many heads as it has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from core_attention.errors import TensorError
from trainer_client.errors import SessionError
from trainer_client.hooks.sharded_weights import groups_of, units

_HEADS = ("num_attention_heads", "num_key_value_heads")
_COMPARED = ("job", "n_ranks", "n_layers", "shape", "softmax_scale", "n_nano_batches")


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh of one dimension that tensor parallelism spreads weights of ``model`` over; None:
    there is none.

    FSDP2 puts its dimensions before it, and spreads the other weights over these alone.

    Raises:
        SessionError: the weights are on several meshes that cannot be distinguished.
    """
    meshes = {
        parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)
    }
    if (n_dims := _dims_of_fsdp(model)) > 0:
        meshes = {mesh for mesh in meshes if mesh.ndim > n_dims}
    if not meshes:
        return None
    mesh, *others = meshes
    if others or (mesh.ndim > 1 and not mesh.mesh_dim_names):
        raise SessionError(
            f"the weights are DTensors on {sorted(map(str, meshes))}; give tensor parallelism one "
            "mesh with a name"
        )
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]  # type: ignore[index]


def n_shares(model: nn.Module) -> int:
    """Tensor-parallel ranks that share the layers of ``model``; 1 where there are none, or where
    its meshes do not show it."""
    try:
        mesh = mesh_of(model)
    except SessionError:
        return 1
    return 1 if mesh is None else mesh.size()


def _dims_of_fsdp(model: nn.Module) -> int:
    """Dimensions of the mesh that ``fully_shard`` was given; 0 where it was not applied."""
    groups = (group for unit in units(model) for group in groups_of(unit))
    return max((group.mesh_info.mesh.ndim for group in groups), default=0)


def with_group(model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a session, with the ranks of the tensor-parallel group of ``model``, which its
    ranks compare; they call it together. As they are where there is none.
    """
    mesh = mesh_of(model)
    if mesh is None:
        return options
    own = {name: str(options.get(name)) for name in _COMPARED}
    everyone: list[tuple[int, dict[str, str]]] = [(0, {})] * mesh.size()
    dist.all_gather_object(everyone, (options["rank"], own), group=mesh.get_group())
    ranks = [rank for rank, _ in everyone]
    if len(set(ranks)) < len(ranks):
        raise SessionError(
            f"the ranks of a tensor-parallel group open job {options['job']} as ranks {ranks}; "
            "give rank and n_ranks of torch.distributed"
        )
    for name in _COMPARED:
        values = [told[name] for _, told in everyone]
        if len(set(values)) > 1:
            raise SessionError(
                f"ranks {ranks} of a tensor-parallel group differ in {name}: {values}; give them "
                "equal options, and heads that they divide"
            )
    return {**options, "tensor_parallel_ranks": ranks}


def check_heads(model: nn.Module) -> None:
    """Checks that the ranks of a tensor-parallel group can share the heads of ``model``."""
    n_ranks = n_shares(model)
    if uneven := {name: n for name, n in _heads_of(model).items() if n % n_ranks}:
        shown = " and ".join(f"{name}={n}" for name, n in uneven.items())
        raise SessionError(
            f"the model has {shown}, which {n_ranks} tensor-parallel ranks cannot share; give it "
            "heads that they divide"
        )


def _heads_of(model: nn.Module) -> dict[str, int]:
    """Those that a model of transformers is configured with."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return {}
    text = config.get_text_config()
    found = {name: getattr(text, name, None) for name in _HEADS}
    return {name: heads for name, heads in found.items() if isinstance(heads, int)}


def check_local(**tensors: torch.Tensor) -> None:
    """Checks that core attention is given rows and heads that this rank has."""

    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            shown = ", ".join(map(str, tensor.placements))
            raise TensorError(
                f"{name} is a DTensor of shape {tuple(tensor.shape)}, placed as ({shown}); pass "
                f"{name}.to_local(), or leave use_local_output=True in ColwiseParallel"
            )
