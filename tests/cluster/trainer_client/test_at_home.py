"""What nobody has planned is computed at home: evaluation, generation, reference models."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import transformers

from tests.cluster.trainer_client.test_transformers import (
    CONFIGS,
    LENGTHS,
    SIZES,
    make_batches,
    make_model,
)
from tests.support.cluster import Cluster
from tests.support.gradients import assert_gradients
from tests.support.loops import attached
from trainer_client import at_home
from trainer_client.local_attention import at_home as at_home_module
from trainer_client.local_attention import plain
from trainer_client.models.transformers import UnsupportedModel

TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
"""float32 through two layers; kernels sum in another order."""


def pair(name: str = "Llama") -> tuple[Any, Any]:
    """A model with distca and one of the same weights with PyTorch's attention."""
    return pair_of(CONFIGS[name])


def pair_of(config: transformers.PreTrainedConfig, locally: str = "sdpa") -> tuple[Any, Any]:
    """The same of a configuration."""
    model, local = (make_model(copy.deepcopy(config), i) for i in ("distca", locally))
    local.load_state_dict(model.state_dict())
    return model, local


def ids_of(*shape: int) -> torch.Tensor:
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_evaluation_outside_of_steps(caplog: pytest.LogCaptureFixture) -> None:
    at_home_module._said.clear()
    model, local = pair()
    ids, mask = ids_of(3, 7), torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0] * 2 + [1] * 5])
    (packed,) = make_batches(lengths=([5, 1, 30],))
    with caplog.at_level(logging.INFO, "trainer_client"):
        for batch in (
            {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)},
            packed,
            {"input_ids": ids},
        ):
            torch.testing.assert_close(model(**batch).logits, local(**batch).logits, **TOLERANCE)
    said = [r for r in caplog.records if "computed at home" in r.getMessage()]
    assert len(said) == 1
    # Documents do not see each other: each alone gives the same.
    alone = local(input_ids=packed["input_ids"][:, 6:]).logits
    torch.testing.assert_close(model(**packed).logits[:, 6:], alone, **TOLERANCE)


def test_packed_documents_make_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128K rows it would have 16 GiB."""
    model, _ = pair()
    made: list[Any] = []
    monkeypatch.setattr(at_home_module, "sdpa_mask", lambda **asked: made.append(asked))
    with torch.no_grad():
        model(**make_batches()[0])
    assert not made


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3"])
@torch.no_grad()
def test_generation_with_a_cache_of_fixed_size(name: str) -> None:
    """Masks are made beside the model then, one for all layers or one for each kind; with one new
    token the prompt fills the cache."""
    windows = {"Mistral": {"sliding_window": 4}, "Gemma3": {"sliding_window": 4}}.get(name, {})
    kinds = {"Gemma3": "Gemma3Text"}
    config = getattr(transformers, f"{kinds.get(name, name)}Config")(**SIZES, **windows)
    model, local = pair_of(config)
    ids, mask = ids_of(2, 6), torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    for new_tokens in (8, 1):
        settings: dict[str, Any] = {
            "max_new_tokens": new_tokens,
            "do_sample": False,
            "cache_implementation": "static",
            "use_cache": True,
        }
        for given in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[:1]}):
            expected = local.generate(**given, **settings)
            assert torch.equal(model.generate(**given, **settings), expected)


CAPPED = {
    "Mistral": transformers.MistralConfig(**SIZES, sliding_window=4),
    "Gemma2": transformers.Gemma2Config(
        **SIZES, attn_logit_softcapping=0.5, query_pre_attn_scalar=16, sliding_window=4
    ),
    "GptOss": transformers.GptOssConfig(
        **SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=4
    ),
    "GptOss, a window longer than the row": transformers.GptOssConfig(
        **SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=64
    ),
}
"""With a softcap that bends scores of this size, and with sinks; each has layers with a window.
Masks of gpt-oss know no documents in a row."""


def capped_pair(name: str) -> tuple[Any, Any]:
    pair: Any = (make_model(copy.deepcopy(CAPPED[name]), i) for i in ("distca", "eager"))
    model, local = pair
    for layer in model.model.layers:
        if (sinks := getattr(layer.self_attn, "sinks", None)) is not None:
            torch.nn.init.normal_(sinks)
    local.load_state_dict(model.state_dict())
    return model, local


@pytest.mark.parametrize("name", CAPPED)
@torch.no_grad()
def test_softcaps_and_sinks_are_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows, a whole row, one token, and generation with a cache, as eager attention has
    them; packed documents as each alone."""
    model, local = capped_pair(name)
    ids, mask = ids_of(2, 11), torch.tensor([[1] * 11, [0] * 4 + [1] * 7])
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    for given in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[:1]}):
        seen = given.get("attention_mask", torch.ones(1, 11)).bool()
        torch.testing.assert_close(
            model(**given).logits[seen], local(**given).logits[seen], **TOLERANCE
        )
        assert torch.equal(model.generate(**given, **settings), local.generate(**given, **settings))
    # Queries in blocks of a few.
    monkeypatch.setattr(plain, "_MOST_SCORES", 1 << 9)
    (packed,) = make_batches(lengths=([5, 1, 30],))
    found = model(**packed).logits
    for begin, end in ((0, 5), (5, 6), (6, 36)):
        alone = local(input_ids=packed["input_ids"][:, begin:end]).logits
        torch.testing.assert_close(found[:, begin:end], alone, **TOLERANCE)


@torch.no_grad()
def test_what_no_mask_tells_is_refused() -> None:
    model: Any = make_model(transformers.Gemma2Config(**SIZES), "distca")
    with pytest.raises(UnsupportedModel):
        model(input_ids=ids_of(1, 5), cumulative=True)
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(UnsupportedModel):
        model(input_ids=ids_of(1, 5))


@pytest.mark.parametrize("name", CAPPED)
def test_softcaps_and_sinks_have_gradients_at_home(name: str) -> None:
    model, local = capped_pair(name)
    batch = {"input_ids": ids_of(1, 13), "labels": ids_of(1, 13)}
    with at_home():
        model.train()(**batch).loss.backward()
    local.train()(**batch).loss.backward()
    compare_gradients(model, local)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_at_home_has_gradients(checkpointed: bool) -> None:
    model, local = pair()
    batch = make_batches()[0]
    if checkpointed:
        model.gradient_checkpointing_enable()
    with at_home():
        loss = model.train()(**batch).loss
    loss.backward()
    local(**batch).loss.backward()
    compare_gradients(model, local)


@pytest.mark.parametrize("turns", [1, 2])
def test_a_reference_model_beside_an_attached_one(pool_of_four: Cluster, turns: int) -> None:
    """As DPO has it: log-probabilities of a frozen model, generation, and the trained one."""
    model, local = pair()
    reference = make_model(copy.deepcopy(CONFIGS["Llama"]), "distca")
    torch.nn.init.normal_(reference.lm_head.weight)  # type: ignore[arg-type, union-attr]
    (whole,) = make_batches(lengths=([*LENGTHS[0], *LENGTHS[1]],))
    with attached(pool_of_four, model, f"reference-{turns}", turns=turns):
        with torch.no_grad():
            expected = reference(**whole).logits
            model.generate(whole["input_ids"][:, :5], max_new_tokens=2, use_cache=True)
            before = model(**whole).logits
        logits = model(**whole).logits
        (logits - expected).square().mean().backward()
    torch.testing.assert_close(logits, before)
    (local(**whole).logits - expected).square().mean().backward()
    compare_gradients(model, local)


def compare_gradients(model: Any, local: Any) -> None:
    # float32 through two layers, in another order: tens of roundings of 6e-8.
    assert_gradients(model, local, 2e-5)
