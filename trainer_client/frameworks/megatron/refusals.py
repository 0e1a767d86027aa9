"""Settings of Megatron-core that cannot work: at all, or if halves of a microbatch take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.utils import is_layer_window_attention
from torch import nn
from torch.distributed.fsdp import FSDPModule

from core_attention.tick import MAX_NANO_BATCHES
from trainer_client.frameworks.megatron.rng_fork import can_be_left

_SWITCHES = {
    "qk_clip": "QK clip needs the largest score of each head, which servers do not tell",
    "log_max_attention_logit": "servers do not tell the largest score",
    "apply_query_key_layer_scaling": "layers of a job have one softmax scale",
    "hybrid_context_parallel": "core attention is spread over the ranks already",
    "dynamic_context_parallel": "core attention is spread over the ranks already",
    "fp8_dot_product_attention": "servers compute in the model's dtype",
    "overlap_moe_expert_parallel_comm": "it runs parts of layers of two microbatches in one",
}
"""Settings that must be off, and why; of some, not every version has them."""


def problems(config: Any) -> Iterator[str]:
    """Reasons why ``config`` cannot be trained with served core attention; each says what to do."""
    for name, why in _SWITCHES.items():
        if getattr(config, name, False):
            yield f"{name} is {getattr(config, name)}: {why}; set it to False"
    if config.context_parallel_size > 1:
        yield (
            f"context_parallel_size is {config.context_parallel_size}: core attention is spread "
            "over the ranks already; set it to 1 and give these ranks to data parallelism"
        )
    if config.recompute_granularity == "full":
        yield (
            "recompute_granularity is 'full', which would ask servers again; set it to "
            "'selective' with recompute_modules such as ['layernorm', 'mlp'], or None"
        )
    if config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules:
        yield (
            f"recompute_modules is {config.recompute_modules}, of which core_attn (the default) "
            "would be asked of servers again; name others, such as ['layernorm', 'mlp']"
        )
    if config.fine_grained_activation_offloading and "core_attn" in config.offload_modules:
        yield f"offload_modules is {config.offload_modules}; leave core_attn out"
    graphs = getattr(config, "cuda_graph_impl", "none")
    if graphs != "none":
        yield f"cuda_graph_impl is {graphs!r}: a graph cannot hold messages; set it to 'none'"
    if config.softmax_type != "vanilla":
        yield (
            f"softmax_type is {config.softmax_type!r}; attention sinks are not served: set it to "
            "'vanilla'"
        )


def layer_problems(
    config: Any, layer_number: int, attention_type: str, dropout: float
) -> Iterator[str]:
    """Reasons why one layer cannot be served."""
    if attention_type != "self":
        yield f"layer {layer_number} has {attention_type} attention; self-attention alone is served"
    if dropout:
        yield f"attention_dropout of layer {layer_number} is {dropout}; set it to 0"
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        yield (
            f"window_size is {config.window_size} in layer {layer_number}; leave core_attention of "
            "layers with a sliding window as it is, see serve(spec)"
        )


_KEPT_FOR_ALL = "its state is one for the whole process, and halves would take each other's"

_SWITCHES_OF_TURNS = {
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
    """The model inside Megatron's wrappers."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


def reasons_against_turns(chunks: Sequence[nn.Module], n_microbatches: int) -> Iterator[str]:
    """Reasons why the halves of a microbatch of this model cannot take turns; the same on all
    ranks.

    Args:
        chunks: of the model on this rank, wrapped or not.
        n_microbatches: of a step.
    """
    for chunk in chunks:
        yield from _of_wrappers(chunk)
    config: Any = getattr(unwrapped(chunks[0]), "config", None)
    for name, why in _SWITCHES_OF_TURNS.items():
        if value := getattr(config, name, None):
            yield f"{name} is {value}: {why}"
    if _draws_in_blocks(config) and not can_be_left():
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
