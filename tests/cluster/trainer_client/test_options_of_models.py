"""A session's options that follow from a model: its core attention is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import trainer_client.models.transformers
from tests.support.errors import refused
from tests.support.model_options import options_for
from trainer_client import AttentionShape, SessionError
from trainer_client.models.transformers import UnsupportedModel

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
JOB: dict[str, Any] = {"control_plane": "127.0.0.1:7700", "job": "probe", "rank": 0, "n_ranks": 1}
SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=16, head_dim_v=16, dtype="float32")


def make_model(config: transformers.PreTrainedConfig, **options: Any) -> Any:
    assert trainer_client.models.transformers.IMPLEMENTATION == "distca"
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_config(config, attn_implementation="distca", **options)


def llama(**options: Any) -> Any:
    return make_model(transformers.LlamaConfig(**SIZES), **options)


@pytest.mark.parametrize(
    ("config", "n_layers", "shape", "scale"),
    [
        (transformers.LlamaConfig(**SIZES), 3, SHAPE, 0.25),
        (
            transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"]),
            1,
            SHAPE,
            0.25,
        ),
        (transformers.GraniteConfig(**SIZES, attention_multiplier=0.3), 3, SHAPE, 0.3),
        (
            transformers.DeepseekV3Config(
                **{**SIZES, "num_key_value_heads": 4},
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=16,
                v_head_dim=12,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                moe_intermediate_size=32,
            ),
            3,
            AttentionShape(
                num_heads=4, num_heads_kv=4, head_dim=24, head_dim_v=12, dtype="float32"
            ),
            24**-0.5,
        ),
    ],
    ids=["plain", "hybrid", "scale", "latent-attention"],
)
def test_shape_calls_and_scale_are_found(
    config: transformers.PreTrainedConfig, n_layers: int, shape: AttentionShape, scale: float
) -> None:
    options = options_for(make_model(config), **JOB)
    assert (options.n_layers, options.shape, options.device) == (n_layers, shape, "cpu")
    assert options.softmax_scale == pytest.approx(scale)


def test_layers_with_windows_are_not_counted() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Qwen2Config(**SIZES, layer_types=kinds, use_sliding_window=True)
    assert options_for(make_model(config), **JOB).n_layers == 1


def test_autocast_of_the_caller_decides_the_dtype() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert options_for(llama(), **JOB).shape.dtype == "bfloat16"


def test_a_model_in_half_precision_is_found_as_such() -> None:
    options = options_for(llama(dtype=torch.bfloat16), **JOB)
    assert options.shape.dtype == "bfloat16"


class Adapter(nn.Module):
    """Around a model of transformers, as adapters are: any arguments, the model's config."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model, self.config = model, model.config

    def forward(self, **arguments: Any) -> Any:
        return self.base_model(**arguments)


def test_wrappers_are_passed_by() -> None:
    """Nothing is compiled."""

    def unwanted(*_: Any, **__: Any) -> Any:
        raise AssertionError("a wrapper was run")

    model = llama()
    for layer in model.model.layers:
        layer.compile(backend=unwanted)
    wrapped = Adapter(torch.compile(model, backend=unwanted))
    assert options_for(wrapped, **JOB).n_layers == 3


def on_meta() -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = llama()
    return model


def of_other_scales() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = transformers.GPT2Config(**sizes, attn_pdrop=0.0, scale_attn_by_inverse_layer_idx=True)
    model: nn.Module = make_model(config)
    return model


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (on_meta, UnsupportedModel),
        (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), SessionError),
        (of_other_scales, SessionError),
    ],
)
def test_models_without_one_kind_of_calls_are_refused(
    make: Callable[[], nn.Module], error: type[Exception]
) -> None:
    with pytest.raises(error):
        options_for(make(), **JOB)


@pytest.mark.parametrize(
    "given",
    [
        {"n_layers": 2},
        {"shape": AttentionShape(**{**vars(SHAPE), "dtype": "bfloat16"})},
        {"softmax_scale": 0.5},
        {"device": "cuda:3"},
    ],
)
def test_options_that_contradict_the_model_are_refused(given: dict[str, Any]) -> None:
    with refused():
        options_for(llama(), **JOB, **given)


def test_options_that_agree_with_the_model_are_kept() -> None:
    options = options_for(
        llama(), **JOB, n_layers=3, softmax_scale=0.25, device="cpu", n_nano_batches=1
    )
    assert (options.n_layers, options.n_nano_batches) == (3, 1)
