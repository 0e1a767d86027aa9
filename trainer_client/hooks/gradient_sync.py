"""The wrappers of a model that say whether a collective follows a backward pass."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer_client.hooks.sharded_weights import groups_of, is_unit


def is_last_of_round(model: nn.Module) -> bool | None:
    """Return whether gradients are reduced after the backward pass of the forward that begins: all
    ranks come together then, as DDP's ``no_sync`` and FSDP2's ``set_requires_gradient_sync`` say.
    None: no wrapper says it.

    Args:
        model: that is called, or a part of it.
    """
    # The outermost one's forward calls the model; TorchDynamo finds it in the same way.
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if wrapper is not None:
        return torch.is_grad_enabled() and bool(wrapper.require_backward_grad_sync)
    groups = (group for module in model.modules() if is_unit(module) for group in groups_of(module))
    group = next(groups, None)
    return None if group is None else torch.is_grad_enabled() and bool(group.reduce_grads)
