"""Models with a tower of pictures around a language model, beside transformers' own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from tests.cluster.trainer_client.test_transformers import SIZES, make_batches
from tests.support.cluster import Cluster
from tests.support.gradients import assert_gradients
from tests.support.loops import attached
from trainer_client.models.transformers import UnsupportedModel

PICTURE = 5
"""The token that a picture's features take the place of."""

TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


def llava(implementation: str) -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**TOWER),
        text_config=transformers.LlamaConfig(**SIZES),
        image_token_index=PICTURE,
        vision_feature_layer=-1,
        image_seq_length=4,
    )
    untyped: Any = transformers.LlavaForConditionalGeneration
    return untyped._from_config(config, attn_implementation=implementation)


def gemma3(implementation: str) -> Any:
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**TOWER),
        text_config=transformers.Gemma3TextConfig(
            **SIZES,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=8,
            query_pre_attn_scalar=16,
        ),
        image_token_index=PICTURE,
        mm_tokens_per_image=4,
    )
    untyped: Any = transformers.Gemma3ForConditionalGeneration
    return untyped._from_config(config, attn_implementation=implementation)


def twice(make: Callable[[str], Any]) -> tuple[Any, Any]:
    model, local = make("distca"), make("sdpa")
    local.load_state_dict(model.state_dict())
    return model, local


def train(
    cluster: Cluster, job: str, model: Any, local: Any, batch: dict[str, Any], **options: Any
) -> None:
    with attached(cluster, model, job, **options):
        model(**batch).loss.backward()
    local(**batch, use_cache=False).loss.backward()
    for each in (model, local):
        for name, parameter in each.named_parameters():
            # Softmax takes no notice of what the biases of keys add to a query's scores.
            if name.endswith("k_proj.bias"):
                parameter.grad = None
    # float32 through four layers, in another order: tens of roundings of 6e-8.
    assert_gradients(model, local, 2e-5)


def row_of(*lengths: int) -> dict[str, torch.Tensor]:
    (row,) = make_batches(lengths=(list(lengths),))
    ids = row["input_ids"].where(row["input_ids"] != PICTURE, PICTURE + 1)
    return {
        "input_ids": ids,
        "position_ids": row["position_ids"],
        "labels": ids.where(row["position_ids"] > 0, -100),
    }


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_tower_keeps_its_own_attention(pool_of_four: Cluster, checkpointed: bool) -> None:
    model, local = twice(llava)
    assert model.model.vision_tower.config._attn_implementation == "sdpa"
    assert model.model.language_model.config._attn_implementation == "distca"
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    row = row_of(12, 20, 9)
    row["input_ids"][0, 2:6] = row["input_ids"][0, 14:18] = PICTURE
    row["labels"] = row["labels"].where(row["input_ids"] != PICTURE, -100)
    pictures = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    batch = {**row, "pixel_values": pictures}
    train(pool_of_four, f"llava-{checkpointed}", model, local, batch, turns=2)


def test_a_tower_keeps_its_own_attention_when_the_implementation_is_set() -> None:
    model = llava("eager")
    model.set_attn_implementation("distca")
    assert model.model.vision_tower.config._attn_implementation == "sdpa"
    assert model.model.language_model.config._attn_implementation == "distca"


@pytest.mark.parametrize(
    "options", [{"turns": 1}, {"turns": 2}, {"turns": 2, "cut_documents": True}]
)
def test_masks_that_are_made_around_the_decoder(
    pool_of_four: Cluster, options: dict[str, Any]
) -> None:
    """The whole row's, which its nano-batches get."""
    model, local = twice(gemma3)
    job = f"gemma3-{options['turns']}-{len(options)}"
    train(pool_of_four, job, model, local, row_of(12, 20, 9), **options)


def test_masks_of_the_model_s_own_are_refused(pool_of_four: Cluster) -> None:
    model = gemma3("distca")
    row = row_of(12, 20, 9)
    row["token_type_ids"] = torch.zeros_like(row["input_ids"])
    with attached(pool_of_four, model, "pictures"), pytest.raises(UnsupportedModel):
        model(**row)


def test_padded_batches_are_refused_where_masks_are_made_around(pool_of_four: Cluster) -> None:
    model = gemma3("distca")
    ids = row_of(20)["input_ids"].view(2, 10)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    with attached(pool_of_four, model, "padded"), pytest.raises(UnsupportedModel):
        model(**batch)
