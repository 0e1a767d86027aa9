"""Sharded weights: FSDP2 (``fully_shard``) around modules through which nano-batches interleave.

FSDP2 frees a module's gathered weights, and reduces its gradients, when a forward or backward
leaves it. Under ping-pong the first nano-batch to leave would free weights that the second still
needs, and every nano-batch would reduce gradients of its own. So both wait for the last one:

* forward: FSDP2 does not reshard; the module is resharded when all nano-batches have left it;
* backward: FSDP2 learns of the first nano-batch only that it leaves. That one is the last to leave,
  since autograd mirrors the forward pass (``trainer_client.step.operation``), and by then
  autograd has summed the gradients of all.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer_client.errors import SessionError
from trainer_client.hooks.checkpointing import recomputes
from trainer_client.hooks.compile_boundary import outside_graphs
from trainer_client.hooks.sharded_weights import (
    groups_of,
    outermost_units,
    prepared,
    refuse_turns,
    resharded,
    reshards,
    units,
)
from trainer_client.step.lane import current_lane
from trainer_client.step.running_step import RunningStep

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def prepare_turns(model: nn.Module) -> None:
    """Has nano-batches take turns in ``model``, and in its modules that ``fully_shard`` was applied
    to; those that were prepared before are passed by.

    Meshes, precision, offloading and ``reshard_after_forward`` stay as ``fully_shard`` has them,
    but for two things: a module that is resharded is so when the last nano-batch has left it, and
    to the full mesh if ``reshard_after_forward`` is a number. Outside of ping-pong the model runs
    as before.

    Several modules that share one unit, ``fully_shard([norm, head])``, must not call core
    attention: they keep gathering and reducing for every nano-batch.

    Args:
        model: in whole; no other way of sharding weights will do.
    """
    refuse_turns(model)
    roots = set(outermost_units(model))
    for unit in units(model):
        if unit in prepared:
            continue
        is_freed = reshards(unit, unit in roots)
        if is_freed:
            resharded.add(unit)
        if not _in_group(unit):
            _LaneGate(unit, reshards=is_freed)
        prepared.add(unit)


def _in_group(unit: Any) -> bool:
    return len(unit._get_fsdp_state()._modules) > 1


class _LaneGate:
    """Makes several nano-batches that interleave in a module look like one to FSDP2's hooks on it.

    Hooks take the tensors among a module's arguments to learn when the backward pass leaves it.
    They see those of the first nano-batch to enter only: autograd mirrors the order of the forward
    pass, so it is the last to leave. Those of the others pass by out of their sight.

    Args:
        module: after ``fully_shard``.
        reshards: its weights are freed between forward and backward.
    """

    def __init__(self, module: Any, *, reshards: bool) -> None:
        self._module = module
        self._reshards = reshards
        self._step: RunningStep | None = None
        self._entered = self._left = 0
        # By those that take turns: how many are to leave in the backward pass.
        self._inside_backward: Counter[range] = Counter()
        self._dtypes: list[torch.dtype] = []
        self._states: list[tuple[Any, Any]] = []
        module.set_reshard_after_forward(False, recurse=False)
        # Before and after FSDP2's own hooks.
        module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        module.register_forward_pre_hook(self._reveal, with_kwargs=True)
        module.register_forward_hook(self._before_leave, prepend=True)
        module.register_forward_hook(self._leave)

    def leave_backward(self, turn: int, beside: range) -> None:
        """The nano-batch that entered as number ``turn`` of ``beside`` leaves in the backward
        pass."""
        self._inside_backward[beside] -= 1
        if turn == 0 and self._inside_backward[beside]:
            raise SessionError(
                "the first nano-batch has left a sharded module before others in the backward "
                "pass; sum all losses and call backward once"
            )

    @outside_graphs
    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        beside = self._beside()
        if beside is None:
            return args, kwargs
        turn, self._entered = self._entered, (self._entered + 1) % len(beside)
        given = _differentiable(args, kwargs)
        if not given:
            return args, kwargs
        self._inside_backward[beside] += 1
        passed = iter(_Entry.apply(self, turn, beside, *given))  # type: ignore[no-untyped-call]
        return _replaced(
            args, kwargs, lambda tensor: next(passed) if turn == 0 else _Hidden(next(passed))
        )

    @outside_graphs
    def _reveal(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Gives the module what was hidden, in the dtype that FSDP2 has given the first lane's."""
        if self._beside() is None:
            return args, kwargs
        self._states = [(group, group._training_state) for group in groups_of(self._module)]
        hidden = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Hidden)]
        if not hidden:
            self._dtypes = [tensor.dtype for tensor in _differentiable(args, kwargs)]
            return args, kwargs
        if len(hidden) == len(self._dtypes):
            for each, dtype in zip(hidden, self._dtypes, strict=True):
                each.tensor = each.tensor.to(dtype)
        shown: Arguments = tree_map_only(_Hidden, lambda each: each.tensor, (args, kwargs))
        return shown

    @outside_graphs
    def _before_leave(self, *_: Any) -> None:
        """FSDP2 takes every nano-batch but the first for one that leaves without having entered,
        and would free the weights under those that are still inside."""
        if self._beside() is not None:
            for group, state in self._states:
                group._training_state = state

    @outside_graphs
    def _leave(self, *_: Any) -> None:
        if recomputes():
            return
        self._left = (self._left + 1) % len(self._beside() or range(1))
        if self._left == 0 and self._reshards:
            self._module.reshard()

    def _beside(self) -> range | None:
        """The nano-batches that pass in turns; None: the module runs by itself, or is recomputed,
        which FSDP2's hooks let pass too."""
        lane = current_lane.get()
        if lane is None or not lane.beside or recomputes():
            return None
        if lane.running is not self._step:
            # Whatever a step that was given up has left is forgotten.
            self._step = lane.running
            self._entered = self._left = 0
            self._inside_backward.clear()
        return lane.beside


class _Hidden:
    """A tensor that hooks do not find."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Entry(torch.autograd.Function):
    """The identity; notes in the backward pass that the module is left."""

    @staticmethod
    def forward(
        ctx: Any, gate: _LaneGate, turn: int, beside: range, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.gate, ctx.turn, ctx.beside = gate, turn, beside
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @outside_graphs
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.gate.leave_backward(ctx.turn, ctx.beside)
        return None, None, None, *gradients


def _differentiable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among arguments that gradients flow to."""
    if not torch.is_grad_enabled():
        return []
    return [
        leaf
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], replace: Any) -> Arguments:
    """Arguments with what ``replace`` makes of the tensors that gradients flow to, in order."""
    replaced: Arguments = tree_map_only(
        torch.Tensor,
        lambda tensor: replace(tensor) if tensor.requires_grad else tensor,
        (args, kwargs),
    )
    return replaced
