"""Model families of transformers: served and right, or refused with the true cause, as the table
of docs/models.md says. ``python -m tests.cluster.trainer_client.model_sweep`` writes that table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers.models.auto import configuration_auto

from core_attention.shape import AttentionShape
from tests.cluster.trainer_client.model_sweep import (
    BIDIRECTIONAL,
    FULL_LAYERS,
    SERVED,
    PlannedStep,
    documented,
    loss_of,
    make_model,
    outcome_of,
    planned_step,
    run_alone,
    run_packed,
)
from tests.support.tiny_models import FAMILIES, tiny_config
from trainer_client.models.document_check import refuse_branches
from trainer_client.models.transformers import UnsupportedModel, check_documents

INSTALLED = Version(transformers.__version__)
TRIED = Version("5.24.0")
"""The release that the table was made with. Another one may look attention up by name in other
families, or lack some: those are right then, or refused."""

DOCUMENTED = {
    family: outcome
    for family, outcome in documented().items()
    if family in configuration_auto.CONFIG_MAPPING
}

SLOW = frozenset(
    {
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "hrm_text",
        "longcat_flash",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "zamba",
        "zamba2",
    }
)
"""Half a minute here, or more; the sweep tries them."""


def test_the_table_names_every_family() -> None:
    if INSTALLED == TRIED:
        assert sorted(DOCUMENTED) == sorted(FAMILIES)
    kinds = (SERVED, BIDIRECTIONAL, FULL_LAYERS)
    assert sum(outcome.kind in kinds for outcome in DOCUMENTED.values()) >= 115


@pytest.mark.parametrize("family", sorted(set(DOCUMENTED) - set(SLOW)))
def test_a_family_is_what_the_table_says(family: str) -> None:
    outcome = outcome_of(family)  # Raises if it trains otherwise than locally.
    if INSTALLED == TRIED:
        assert outcome == DOCUMENTED[family]


def test_families_of_a_newer_transformers_are_right_or_refused() -> None:
    for family in sorted(set(FAMILIES) - set(DOCUMENTED)):
        outcome_of(family)


@pytest.mark.parametrize("family", ["bart", "qwen3_next"])
def test_models_that_mix_documents_may_have_one_a_row(family: str) -> None:
    model = make_model(tiny_config(family), "distca")
    assert check_documents(model).fault
    shape = AttentionShape(num_heads=1, num_heads_kv=1, head_dim=1, head_dim_v=1, dtype="float32")
    with pytest.raises(UnsupportedModel):
        run_packed(model, PlannedStep(shape, 1.0))


@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "jamba", "lfm2", "qwen3_next"])
def test_models_that_carry_state_take_no_documents_that_share_prefixes(family: str) -> None:
    model = make_model(tiny_config(family), "distca")
    check_documents(model)
    with pytest.raises(UnsupportedModel):
        refuse_branches(model)


@pytest.mark.parametrize(
    "family", ["cohere", "gemma3_text", "glm4", "gpt2", "granite", "mixtral", "olmo2", "phi3"]
)
def test_autocast_computes_as_with_sdpa(family: str) -> None:
    config = tiny_config(family, wide_windows=True)
    model, local = make_model(config, "distca"), make_model(config, "sdpa")
    local.load_state_dict(model.state_dict())
    step = planned_step(model)
    step.job.shape = replace(step.job.shape, dtype="bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        logits, expected = run_packed(model, step), run_alone(local)
    assert logits.dtype is expected.dtype
    loss_of(logits).backward()
    loss_of(expected).backward()
    # bfloat16 activations: roundings of 2^-9, over two layers.
    assert (logits - expected).norm() < 2e-2 * expected.norm()
    grads = {name: parameter.grad for name, parameter in local.named_parameters()}
    for name, parameter in model.named_parameters():
        grad, other = parameter.grad, grads[name]
        assert (grad is None) == (other is None), name
        if grad is not None and other is not None:
            assert grad.dtype is torch.float32
            assert (grad - other).norm() <= 5e-2 * other.norm(), name


def test_layers_of_different_shapes_are_all_told() -> None:
    calls = check_documents(make_model(tiny_config("gemma4_text"), "distca")).calls
    assert [call.shape.head_dim for call in calls] == [16, 32]


def test_a_fault_shows_through_weights_that_are_still_zero() -> None:
    """As with projections that begin at zero: fresh position embeddings may be zero as well."""
    model = make_model(tiny_config("bart"), "distca")
    for name, parameter in model.named_parameters():
        if "embed_positions" in name or "out_proj" in name:
            nn.init.zeros_(parameter)
    assert check_documents(model).fault


def test_attention_dropout_is_refused_before_the_first_step() -> None:
    model = make_model(tiny_config("llama", attention_dropout=0.1), "distca").train()
    with pytest.raises(UnsupportedModel):
        check_documents(model)
    check_documents(model.eval())


@pytest.mark.parametrize("dropped", [True, False])
def test_masked_tokens_that_are_counted_over_the_row(dropped: bool) -> None:
    config = transformers.EsmConfig(
        vocab_size=40,
        mask_token_id=32,
        pad_token_id=1,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        position_embedding_type="rotary",
        token_dropout=dropped,
    )
    torch.manual_seed(0)
    untyped: Any = transformers.EsmForMaskedLM
    model = untyped._from_config(config, attn_implementation="distca")
    assert ("token_dropout" in check_documents(model).fault) is dropped
