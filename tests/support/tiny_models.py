"""A tiny configuration of any causal language model of transformers."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""Model types that ``AutoModelForCausalLM`` knows."""

VOCABULARY = 99

TINY_LLAMA: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "use_cache": False,
}
"""Fields of a Llama, and of models like it, whose heads two tensor-parallel ranks can share."""

_SIZES = {
    VOCABULARY: "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    128: "max_position_embeddings n_positions max_seq_len n_ctx max_target_positions "
    "original_max_position_embeddings context_length model_max_length",
    64: "hidden_size d_model n_embd dim embedding_dim embedding_size word_embed_proj_dim "
    "input_embedding_size output_embedding_size lru_width",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff dim_ff ffn_hidden_size "
    "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "intermediate_size_mlp d_inner dense_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size shared_experts_intermediate_size feed_forward_size",
    16: "head_dim d_head dim_head kv_channels swa_head_dim hidden_size_per_layer_input "
    "q_lora_rank kv_lora_rank global_head_dim linear_key_head_dim linear_value_head_dim "
    "linear_head_dim mamba_d_state state_size ssm_state_size d_rel router_hidden_size",
    12: "v_head_dim",
    8: "qk_nope_head_dim qk_rope_head_dim rotary_dim",
    6: "sliding_window attention_chunk_size window_size",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads "
    "encoder_attention_heads swa_num_attention_heads num_experts n_routed_experts "
    "num_local_experts moe_num_experts linear_num_value_heads linear_num_heads",
    2: "num_key_value_heads num_hidden_layers n_layer n_layers num_layers decoder_layers "
    "encoder_layers num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
    "swa_num_key_value_heads linear_num_key_heads num_blocks",
    1: "n_group topk_group n_shared_experts first_k_dense_replace",
}
"""Fields of configurations by the value that they get, where a configuration has them."""

_FIELDS = {name: size for size, names in _SIZES.items() for name in names.split()}

_WIDTHS = (64, 48, 16, 12, 8)
"""Of these, those that are a number of dims."""

_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")

_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")

_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}

_FIXES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "bailing_hybrid": {"num_expert_group": 1},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": _ROTARY, "sliding_attention": _ROTARY},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"full_attn_idxs": [1], "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid"] * 2},
}
"""What a model type needs besides."""


def tiny_config(
    model_type: str, *, wide_windows: bool = False, wider: int = 1, **fields: Any
) -> PreTrainedConfig:
    """A configuration with a few small layers, one of each kind that the model type has, and
    windows of 6 tokens, or as wide as the model type has them; ``wider`` times as wide as usual,
    with as many heads."""
    shrunk = _shrunk(AutoConfig.for_model(model_type).to_dict(), model_type, wider)
    if wide_windows:
        shrunk = {name: size for name, size in shrunk.items() if name not in _WINDOWS}
    return AutoConfig.for_model(model_type, **{**shrunk, **fields})


def _shrunk(default: dict[str, Any], model_type: str, wider: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in default.items():
        if name in _FIELDS and isinstance(value, int) and not isinstance(value, bool):
            size = _FIELDS[name] * (wider if _FIELDS[name] in _WIDTHS else 1)
            fields[name] = min(size, value) if name != "vocab_size" else VOCABULARY
        elif name.endswith("_token_id") and isinstance(value, int):
            fields[name] = value % 8
        elif isinstance(value, dict) and "model_type" in value:
            fields[name] = _shrunk(value, str(value.get("model_type")), wider)
            fields[name]["model_type"] = value.get("model_type")
    if "qk_rope_head_dim" in fields:
        # Multi-head latent attention: every head has keys of its own.
        fields |= {"head_dim": 8 * wider} if "head_dim" in default else {}
        fields |= {"num_key_value_heads": 4} if "num_key_value_heads" in default else {}
    if "qk_head_dim" in default:
        fields["qk_head_dim"] = fields["qk_rope_head_dim"] + fields["qk_nope_head_dim"]
    kinds: list[Any] = []
    for name in _KINDS:
        if isinstance(of_layers := default.get(name), list | tuple):
            kinds = list(dict.fromkeys(of_layers))
            n_layers = max(len(kinds), 2)
            fields[name] = (kinds * 2)[:n_layers]
            fields["num_hidden_layers"] = n_layers
    fixes = {
        name: value * wider if name in ("head_dim", "global_head_dim") else value
        for name, value in _FIXES.get(model_type, {}).items()
    }
    return {**fields, **fixes}
