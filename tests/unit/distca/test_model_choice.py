"""``--model-config``: families train with their models' scale and shape, or nothing is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import trainer_client.models.transformers
from core_attention.shape import AttentionShape, format_shape, parse_shape
from distca.apps.data.corpus import VOCABULARY_SIZE
from distca.apps.train.language_model import LanguageModel, has_plain_head
from distca.apps.train.model import (
    attention_shape,
    build_model,
    check_packed,
    model_config,
)
from distca.apps.train.settings import ModelSettings
from distca.cli import app
from distca.errors import ModelConfigError
from tests.support.tiny_models import tiny_config
from trainer_client import SessionOptions


def settings_of(tmp_path: Path, family: str, **fields: Any) -> ModelSettings:
    """Settings that name a JSON file, as ``save_pretrained`` writes it."""
    config = tiny_config(family, vocab_size=VOCABULARY_SIZE, **fields)
    if hasattr(config, "vocab_size_per_layer_input"):
        config.vocab_size_per_layer_input = VOCABULARY_SIZE
    path = tmp_path / f"{family}.json"
    path.write_text(config.to_json_string(use_diff=False))
    return ModelSettings(model_config=path)


def build(tmp_path: Path, family: str, dtype: str = "float32", **fields: Any) -> Any:
    return build_model(
        model_config(settings_of(tmp_path, family, **fields), max_positions=64),
        attention=trainer_client.models.transformers.IMPLEMENTATION,
        dtype=dtype,
        seed=0,
    )


@pytest.mark.parametrize(
    ("family", "fields", "shape", "scale"),
    [
        ("granite", {"attention_multiplier": 0.125}, "4:2:16:float32", 0.125),
        # It scales queries itself.
        ("opt", {}, "4:4:16:float32", 1.0),
        ("deepseek_v3", {}, "4:4:16/12:float32", 0.25),
        ("deepseek_v2", {}, "4:4:16/12:float32", 0.25),
        ("gpt2", {"attn_pdrop": 0.0}, "4:4:16:float32", 0.25),
    ],
)
def test_shape_and_scale_are_those_of_the_model(
    tmp_path: Path, family: str, fields: dict[str, Any], shape: str, scale: float
) -> None:
    model = build(tmp_path, family, **fields)
    check_packed(model)
    options = SessionOptions.for_model(model, control_plane="h:1", job="j", rank=0, n_ranks=1)
    assert format_shape(options.shape) == shape
    assert options.scale == pytest.approx(scale)
    assert options.n_layers == 2
    # What servers are told to measure, before the model is there.
    assert attention_shape(model.config, "float32") == options.shape


def test_a_shape_with_another_head_dim_of_values_is_written_as_it_is_read() -> None:
    shape = AttentionShape(
        num_heads=128, num_heads_kv=128, head_dim=192, head_dim_v=128, dtype="bfloat16"
    )
    assert format_shape(shape) == "128:128:192/128:bfloat16"
    assert parse_shape("128:128:192/128:bfloat16") == shape
    with pytest.raises(ValueError, match="192/128"):
        parse_shape("128:128:192/128/64:bfloat16")
    with pytest.raises(
        ValueError, match="shape is '32:7:128:bfloat16': num_heads 32 is not a mult"
    ):
        parse_shape("32:7:128:bfloat16")


@pytest.mark.parametrize(
    ("family", "cause"),
    [
        ("falcon", "attention by itself"),
        ("gpt_neo", "attention by itself"),
        ("bloom", "ALiBi"),
        ("mpt", "ALiBi"),
        ("xglm", "attention by itself"),
    ],
)
def test_families_without_the_attention_interface_are_refused_by_their_configuration(
    tmp_path: Path, family: str, cause: str
) -> None:
    with pytest.raises(ModelConfigError, match=f"model type '{family}'.*{cause}"):
        model_config(settings_of(tmp_path, family), max_positions=64)


@pytest.mark.parametrize(
    ("family", "cause"),
    [
        ("bart", "ignores position_ids"),
        ("lfm2", "neighbours in the row"),
        ("inkling_text", "bias"),
        ("mamba", "calls no attention"),
    ],
)
def test_models_that_cannot_be_trained_on_packed_documents_are_refused(
    tmp_path: Path, family: str, cause: str
) -> None:
    with pytest.raises(ModelConfigError, match=f"model type '{family}'.*{cause}"):
        check_packed(build(tmp_path, family))


def test_attention_dropout_is_refused_by_name(tmp_path: Path) -> None:
    model = build(tmp_path, "llama", attention_dropout=0.1)
    with pytest.raises(ModelConfigError, match=r"does not support dropout=0\.1"):
        check_packed(model)


def test_experts_can_be_verified_in_float64(tmp_path: Path) -> None:
    config = model_config(settings_of(tmp_path, "mixtral"), max_positions=64)
    model = build_model(config, attention="sdpa", dtype="float64", seed=0)
    ids = torch.arange(5)[None]
    assert model(input_ids=ids, position_ids=ids, use_cache=False).logits.dtype is torch.float64


def test_a_scale_between_the_hidden_states_and_the_head_is_noticed(tmp_path: Path) -> None:
    """MiniCPM divides hidden states before its head; the loss must not leave that out."""
    fields = {"dim_model_base": 16, "attn_implementation": None}
    model = build_model(
        model_config(settings_of(tmp_path, "minicpm3", **fields), max_positions=64),
        attention="sdpa",
        dtype="float32",
        seed=0,
    )
    assert not has_plain_head(model)
    llama = build_model(
        model_config(settings_of(tmp_path, "llama"), max_positions=64),
        attention="sdpa",
        dtype="float32",
        seed=0,
    )
    assert has_plain_head(llama)
    ids = torch.arange(6)[None]
    loss = LanguageModel(model, plain_head=has_plain_head(model))(ids, ids, ids)
    logits = model(input_ids=ids, position_ids=ids, use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits[0], ids[0], reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_run_with_a_refused_model_ends_before_any_process_is_started(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "falcon")
    result = CliRunner().invoke(
        app,
        [
            "local",
            f"--model-config={settings.model_config}",
            f"--runs-dir={tmp_path}",
            "--name=refused",
        ],
    )
    assert result.exit_code != 0
    assert "model type 'falcon' computes attention by itself" in " ".join(
        (result.output + str(result.exception)).split()
    )
    assert "Starting" not in result.output


def test_a_field_that_transformers_refuses_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    with pytest.raises(ModelConfigError, match="hidden_size"):
        model_config(ModelSettings(model_config=path), max_positions=64)
