"""What cannot work if the two halves of a microbatch take turns, though it can without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.module import Float16Module
from torch import nn
from torch.distributed.fsdp import FSDPModule

from core_attention.tick import MAX_NANO_BATCHES
from trainer_client.frameworks.megatron import rng_fork

_KEPT_FOR_ALL = "its state is one for the whole process, and halves would take each other's"

_SWITCHES = {
    "fp8": _KEPT_FOR_ALL,
    "fp4": _KEPT_FOR_ALL,
    "cpu_offloading": _KEPT_FOR_ALL,
    "fine_grained_activation_offloading": _KEPT_FOR_ALL,
    "moe_paged_stash": _KEPT_FOR_ALL,
    "delay_wgrad_compute": "layers put off one gradient of weights in a microbatch",
    "overlap_dispatch_backward_with_experts_wgrad": "layers put off one gradient of weights in a "
    "microbatch",
    "tp_comm_overlap": "its buffers have the size of a microbatch",
    "mtp_num_layers": "its losses are means over what a forward pass has",
}
"""Settings that must be off, and why; of some, not every version has them."""


def unwrapped(model: nn.Module) -> nn.Module:
    """What Megatron's wrappers are around."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


def reasons(chunks: Sequence[nn.Module], n_microbatches: int) -> Iterator[str]:
    """Why the halves of a microbatch of this model cannot take turns; the same on all ranks.

    Args:
        chunks: of the model on this rank, wrapped or not.
        n_microbatches: of a step.
    """
    for chunk in chunks:
        yield from _of_wrappers(chunk)
    config: Any = getattr(unwrapped(chunks[0]), "config", None)
    for name, why in _SWITCHES.items():
        if value := getattr(config, name, None):
            yield f"{name} is {value}: {why}"
    if _draws_in_blocks(config) and not rng_fork.can_be_left():
        yield (
            "sequence_parallel is True, with dropout and use_te_rng_tracker: both halves would "
            "draw the same numbers"
        )
    if getattr(config, "num_moe_experts", None):
        yield from _of_experts(config)
    if 2 * n_microbatches > MAX_NANO_BATCHES:
        yield (
            f"n_microbatches is {n_microbatches}, and at most {MAX_NANO_BATCHES // 2} can be cut "
            "in two"
        )


def _draws_in_blocks(config: Any) -> bool:
    """Return whether random numbers are drawn in the fork around all layers."""
    return bool(
        config is not None
        and config.sequence_parallel
        and (config.hidden_dropout or config.moe_input_jitter_eps)
    )


def has_experts_apart(config: Any) -> bool:
    """Return whether experts, or parts of one, are on ranks that hold other documents."""
    tensor_parallel = config.tensor_model_parallel_size
    sharing = config.expert_tensor_parallel_size or tensor_parallel
    return bool(config.expert_model_parallel_size > 1 or sharing > tensor_parallel)


def _of_wrappers(chunk: nn.Module) -> Iterator[str]:
    model = chunk
    while isinstance(model, DistributedDataParallel | Float16Module):
        model = model.module
    if not isinstance(model, LanguageModule):
        yield (
            f"a model chunk is {type(model).__name__}, neither GPTModel, MambaModel nor HybridModel"
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        yield "FSDP2 shards the model: the half that leaves a layer first frees the other's weights"


def _of_experts(config: Any) -> Iterator[str]:
    coefficients = config.moe_aux_loss_coeff
    if not isinstance(coefficients, list):
        coefficients = [coefficients]
    adds_losses = any(coefficients) or config.moe_z_loss_coeff
    if adds_losses and not config.calculate_per_token_loss:
        yield (
            f"moe_aux_loss_coeff is {config.moe_aux_loss_coeff} and moe_z_loss_coeff "
            f"{config.moe_z_loss_coeff}: losses of experts would count twice; set "
            "calculate_per_token_loss to True"
        )
    if any(coefficients) and "global_aux_loss" in config.moe_router_load_balancing_type:
        yield (
            "moe_router_load_balancing_type has global_aux_loss: it sums over replicas, which may "
            "have one half or two"
        )
    if not has_experts_apart(config):
        return
    apart = (
        f"expert_model_parallel_size is {config.expert_model_parallel_size}, "
        f"expert_tensor_parallel_size {config.expert_tensor_parallel_size},"
    )
    backend = getattr(config, "moe_flex_dispatcher_backend", "deepep")
    if config.moe_token_dispatcher_type == "flex" and backend != "deepep":
        yield (
            f"{apart} and moe_flex_dispatcher_backend {backend!r}, which wants equally many tokens "
            "on all ranks; set it to 'deepep', or moe_token_dispatcher_type to 'alltoall'"
        )
    if config.moe_token_dispatcher_type == "allgather":
        yield (
            f"{apart} and moe_token_dispatcher_type 'allgather', which wants equally many tokens "
            "on all ranks; set it to 'alltoall'"
        )
    if config.moe_pad_expert_input_to_capacity:
        yield (
            f"{apart} and moe_pad_expert_input_to_capacity True, which wants equally many tokens "
            "on all ranks; set it to False"
        )
