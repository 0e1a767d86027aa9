"""Weights that several ranks have a part of: FSDP2's units, FSDP1 and DeepSpeed's ZeRO-3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from trainer_client.errors import SessionError

prepared: WeakSet[nn.Module] = WeakSet()
"""Units through which nano-batches may take turns, see :mod:`trainer_client.step.fsdp`."""
resharded: WeakSet[nn.Module] = WeakSet()
"""Those of them whose weights are freed between forward and backward."""


def units(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that ``fully_shard`` was applied to."""
    return (module for module in model.modules() if is_unit(module))


def is_unit(module: object) -> bool:
    """Return whether ``fully_shard`` was applied to it."""
    return isinstance(module, FSDPModule)


def outermost_units(module: nn.Module) -> Iterator[nn.Module]:
    """The units that are in no other one: the roots."""
    if is_unit(module):
        yield module
        return
    for child in module.children():
        yield from outermost_units(child)


def groups_of(unit: Any) -> list[Any]:
    """The groups that FSDP2 gathers and reduces at once; none if all weights inside belong to
    other ones."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # as it was named when there could be only one
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def reshards(unit: Any, is_root: bool) -> bool:
    """Return whether ``fully_shard`` frees the weights after a forward, which FSDP2 does
    not do for roots unless it was said so."""
    if is_root and unit._get_fsdp_state()._auto_reshard_after_forward:
        return False
    return any(group.post_forward_mesh_info is not None for group in groups_of(unit))


@contextmanager
def gathered_as_before(model: nn.Module) -> Iterator[None]:
    """Lets ``model`` be run in the block, inside its own forward too: those of FSDP2's units whose
    weights are gathered when it begins have them again when it ends."""
    gathered: list[Any] = [
        unit for unit in units(model) if any(group.is_unsharded for group in groups_of(unit))
    ]
    yield
    for unit in gathered:
        unit.unshard()


def is_fsdp_1(module: nn.Module) -> bool:
    """Return whether FSDP1 shards the module or a part of it."""
    return any(isinstance(each, FullyShardedDataParallel) for each in module.modules())


def needs_other_ranks(model: nn.Module) -> bool:
    """Return whether a forward needs other ranks: by FSDP, DeepSpeed's ZeRO-3 or tensor
    parallelism."""
    return is_fsdp_1(model) or any(
        isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")
        for parameter in model.parameters()
    )


def refuse_turns(model: nn.Module) -> None:
    """Checks that nothing but FSDP2 shards weights of ``model``, in which nano-batches are to take
    turns."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise SessionError(
                f"{name!r} is sharded by DeepSpeed's ZeRO-3, whose ranks would wait for each "
                "other; use ZeRO-1, ZeRO-2 or fully_shard, or attach the model with turns=1"
            )
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise SessionError(
                f"{name or type(module).__name__!r} is FullyShardedDataParallel (FSDP1); use "
                "fully_shard (FSDP2), or attach the model with turns=1"
            )


def check_backward_in_parts(model: nn.Module) -> None:
    """Checks that a backward pass in two parts finds the weights of ``model``: PyTorch looks for
    those that a forward has used before anything gathers them again.
    """
    roots = set(outermost_units(model))
    for name, module in model.named_modules():
        if not is_unit(module):
            continue
        if module in resharded if module in prepared else reshards(module, module in roots):
            raise SessionError(
                f"{name or type(module).__name__!r} is freed by fully_shard before the second part "
                "of a backward; call fully_shard with reshard_after_forward=False"
            )
