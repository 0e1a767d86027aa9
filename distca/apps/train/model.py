"""The model that is trained: built by transformers, its core attention chosen by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from core_attention.shape import AttentionShape
from distca.apps.data.corpus import VOCABULARY_SIZE
from distca.apps.train.settings import ModelSettings, Preset
from distca.errors import ModelConfigError
from trainer_client.models.document_check import (
    UnsupportedModel,
    check_documents,
    has_attention_interface,
    no_interface,
)

_FEED_FORWARD_MULTIPLE = 32


def model_config(settings: ModelSettings, max_positions: int) -> PretrainedConfig:
    """The transformers configuration that ``settings`` asks for.

    Args:
        settings: the user's choice.
        max_positions: the longest document, in tokens.

    Raises:
        ModelConfigError: there is no such model, or it takes no bytes, no documents of that length,
            or no served attention.
    """
    if settings.model_preset is not None and settings.model_config is not None:
        raise ModelConfigError(
            f"--model-preset {settings.model_preset} and --model-config {settings.model_config} "
            "both name a model; give one of them"
        )
    if settings.model_config is not None:
        return _config_from_json(settings, settings.model_config, max_positions)
    if settings.model_preset is None:
        return _small_llama(settings, max_positions)
    fields = dict(_PRESETS[settings.model_preset])
    fields["max_position_embeddings"] = max(fields["max_position_embeddings"], max_positions)
    if settings.model_layers is not None:
        fields["num_hidden_layers"] = settings.model_layers
    return AutoConfig.for_model(**fields)


def _config_from_json(settings: ModelSettings, path: Path, max_positions: int) -> PretrainedConfig:
    fields = _read_json(path)
    if settings.model_layers is not None:
        fields["num_hidden_layers"] = settings.model_layers
    try:
        config = AutoConfig.for_model(**fields)
    except Exception as error:
        # Configurations check themselves, each kind with errors of its own.
        raise ModelConfigError(f"{path}: {_first_line(error)}") from error
    models: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in models and not has_attention_interface(models[type(config)]):
        raise ModelConfigError(no_interface(config))
    if config.vocab_size < VOCABULARY_SIZE:
        raise ModelConfigError(
            f"{path}: vocab_size is {config.vocab_size}; tokens are bytes, so it must be "
            f"{VOCABULARY_SIZE} or more"
        )
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and max_positions > most:
        raise ModelConfigError(
            f"{path}: max_position_embeddings is {most}, but documents may have {max_positions} "
            "tokens; give a smaller --max-document-tokens"
        )
    return config


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def build_model(
    config: PretrainedConfig,
    *,
    attention: str,
    dtype: str,
    seed: int,
    device: torch.device = torch.device("cpu"),  # noqa: B008  (immutable)
) -> PreTrainedModel:
    """A causal language model with random weights, the same for the same seed.

    Args:
        config: its sizes.
        attention: name of the attention implementation, for example ``"distca"`` or ``"sdpa"``.
        dtype: torch name of the weights' dtype.
        seed: of the weights.
        device: where they are made.

    Raises:
        ModelConfigError: transformers cannot build it.
    """
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM  # from_config has no annotations
    try:
        with device:
            model: PreTrainedModel = auto.from_config(
                # A copy, because the model keeps it and writes the attention's name into it.
                copy.deepcopy(config),
                attn_implementation=attention,
                dtype=getattr(torch, dtype),
            )
    except UnsupportedModel as error:
        raise ModelConfigError(str(error)) from error
    except Exception as error:
        # Models check their configurations, each kind with errors of its own.
        raise ModelConfigError(
            f"model type {config.model_type!r}: {_first_line(error)} ({type(error).__name__})"
        ) from error
    if dtype == "float64" and hasattr(model, "set_experts_implementation"):
        # The grouped matrix product of experts has no float64; their plain loop has.
        model.set_experts_implementation("eager")
    model.train()
    return model


def attention_shape(config: PretrainedConfig, dtype: str) -> AttentionShape:
    """Heads and head dims of ``config``'s core attention, as its fields say."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    heads_kv = getattr(text, "num_key_value_heads", None) or heads
    head_dim_v = head_dim
    if (rotary := getattr(text, "qk_rope_head_dim", None)) is not None:
        # Multi-head latent attention: every head has keys and values of its own.
        head_dim, head_dim_v, heads_kv = text.qk_nope_head_dim + rotary, text.v_head_dim, heads
    return AttentionShape(
        num_heads=heads,
        num_heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
    )


def check_packed(model: PreTrainedModel) -> None:
    """Checks by a few tokens that ``model``, built with ``attn_implementation="distca"``, can be
    trained on packed documents.

    Raises:
        ModelConfigError: it cannot; says why.
    """
    name = f"model type {model.config.model_type!r}"
    try:
        check = check_documents(model)
    except UnsupportedModel as error:
        raise ModelConfigError(f"{name}: {error}") from error
    if check.fault:
        raise ModelConfigError(
            f"{name} cannot be trained on packed documents: {check.fault}; choose another type"
        )
    if check.needs != {"position_ids"}:
        raise ModelConfigError(
            f"{name} keeps packed documents apart by {sorted(check.needs)}, and distca train gives "
            "position_ids alone; train it in a program of your own"
        )


def describe_model(config: PretrainedConfig) -> str:
    """A model's type and sizes, in words."""
    return (
        f"{config.model_type}, {config.num_hidden_layers} layers, hidden {config.hidden_size}, "
        f"{config.num_attention_heads} heads, "
        f"{getattr(config, 'num_key_value_heads', None) or config.num_attention_heads} kv heads"
    )


def _small_llama(settings: ModelSettings, max_positions: int) -> PretrainedConfig:
    # 8/3 of the width, as Llama has it, rounded up.
    feed_forward = -(-8 * settings.hidden_size // (3 * _FEED_FORWARD_MULTIPLE))
    return AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY_SIZE,
        hidden_size=settings.hidden_size,
        intermediate_size=feed_forward * _FEED_FORWARD_MULTIPLE,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        # Bytes are the whole vocabulary: none of them is special.
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )


_PRESETS: dict[Preset, dict[str, Any]] = {
    Preset.LLAMA_3_8B: {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
        "use_cache": False,
    }
}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text())
    except OSError as error:
        raise ModelConfigError(f"{path}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelConfigError(f"{path}: this is no JSON: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ModelConfigError(
            f"{path}: no model_type; give a transformers config.json, whose model_type is for "
            "example 'llama'"
        )
    return {**fields, "use_cache": False}
