"""What cannot work, found in a ``TransformerConfig`` of Megatron-core before a layer is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.utils import is_layer_window_attention

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
    """Why ``config`` cannot be trained with served core attention; each says what to do."""
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
    """Why one layer cannot be served."""
    if attention_type != "self":
        yield f"layer {layer_number} has {attention_type} attention; self-attention alone is served"
    if dropout:
        yield f"attention_dropout of layer {layer_number} is {dropout}; set it to 0"
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        yield (
            f"window_size is {config.window_size} in layer {layer_number}; leave core_attention of "
            "layers with a sliding window as it is, see serve(spec)"
        )
