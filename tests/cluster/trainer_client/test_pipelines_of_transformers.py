"""Models of transformers as stages of a pipeline: measured, run for their shapes, and trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import AutoConfig, AutoModelForCausalLM

from core_attention.manifest import RankManifest
from tests.support.cluster import Cluster, keep_profile, on_this_host
from tests.support.cut_manifests import cut_in_two
from tests.support.gradients import assert_gradients
from tests.support.model_options import options_for
from trainer_client import (
    Pipeline,
    Pipelining,
    Session,
    SessionError,
    measure_stages,
    schedule_of,
)
from trainer_client.models.transformers import IMPLEMENTATION, check_documents

MICROBATCHES, ROWS, TOKENS, VOCABULARY = 3, 2, 40, 50
LENGTHS: Sequence[Sequence[int]] = ((40,), (7, 33), (1, 38, 1), (20, 20), (39, 1), (3, 30, 7))
CUT: Sequence[Sequence[int]] = ((80,), (7, 70, 3), (38, 42))
"""By microbatch, whose rows are cut in the middle."""


class LogitsOf(nn.Module):
    """The model as a stage: positional hidden states or ids in, logits out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            input_ids=ids, position_ids=position_ids, use_cache=False
        ).logits
        return logits


class LayersOf(nn.Module):
    """The same by hand, as stages that hold some of a model's layers are written."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        base = self.model.model
        hidden = base.embed_tokens(ids)
        rotary = base.rotary_emb(hidden, position_ids)
        for layer in base.layers:
            hidden = layer(
                hidden, attention_mask=None, position_ids=position_ids, position_embeddings=rotary
            )
        logits: torch.Tensor = self.model.lm_head(base.norm(hidden))
        return logits


def model_with(attention: str, kind: str = "llama", **sizes: Any) -> Any:
    config = AutoConfig.for_model(
        kind,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        **sizes,
    )
    torch.manual_seed(0)
    models: Any = AutoModelForCausalLM
    return models.from_config(config, attn_implementation=attention).train()


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), ids.flatten(), reduction="sum")


WINDOWED: dict[str, Any] = {
    "kind": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 1,
}
"""The second layer has a window, and is computed at home."""


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("kind", "fields", "is_cut"),
    [
        (LogitsOf, {}, False),
        (LayersOf, {}, False),
        (LogitsOf, {}, True),
        (LogitsOf, WINDOWED, True),
    ],
    ids=["whole", "by hand", "cut", "cut, a window"],
)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_transformers_model_trains_as_a_stage(
    tmp_path: Path,
    pool_of_four: Cluster,
    checkpointed: bool,
    kind: type[Any],
    fields: dict[str, Any],
    is_cut: bool,
) -> None:
    """Also where documents lie in both rows of a microbatch."""
    model, expected = model_with(IMPLEMENTATION, **fields), model_with("eager", **fields)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module = kind(model)
    stage = PipelineStage(module, 0, 1, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    documents = CUT if is_cut else LENGTHS
    positions = torch.cat([torch.arange(n) for row in documents for n in row]).view(-1, TOKENS)
    ids = torch.randint(VOCABULARY, positions.shape)
    chosen = options_for(
        model,
        control_plane=pool_of_four.address,
        job=f"{kind.__name__}-{len(fields)}-{is_cut}-{checkpointed}",
        rank=0,
        n_ranks=1,
        n_nano_batches=MICROBATCHES * ROWS,
        **on_this_host(tmp_path),
    )
    assert chosen.n_layers == (1 if fields else 2)
    seconds = measure_stages(
        {0: (module, lambda: module(ids[:ROWS], positions[:ROWS]))}, 1, ROWS * TOKENS
    )
    assert min(*seconds.forward_seconds, *seconds.backward_seconds) > 0
    order, layers = schedule_of(schedule), [chosen.n_layers]
    facts = Pipelining(schedule=order, pipeline_ranks=[0], layers=layers, **seconds._asdict())
    keep_profile(tmp_path, chosen.shape)
    losses: list[torch.Tensor] = []
    with Session.open(replace(chosen, pipelining=facts)) as session:
        pipeline = Pipeline(session, stage)
        if is_cut:
            halves = [half for i, row in enumerate(CUT) for half in cut_in_two(row, first_id=8 * i)]
            session.submit(RankManifest(0, 0, halves))
        else:
            session.submit(RankManifest.from_lengths(0, 0, LENGTHS))
        with pipeline.step(0):
            with pytest.raises(SessionError):
                module(ids[:1], positions[:1])
            schedule.step(ids, target=ids, losses=losses, position_ids=positions)
    check(model, expected, losses, ids.view(len(documents), -1), documents)


@pytest.mark.parametrize("embeddings", [None, nn.Identity()])
def test_a_stage_without_embeddings_is_checked(embeddings: nn.Module | None) -> None:
    model = model_with(IMPLEMENTATION)
    model.model.embed_tokens = embeddings
    model.lm_head = None
    found = check_documents(model.model)
    assert len(found.calls) == 2
    assert not found.fault
    model.model.layers[0].register_forward_hook(lambda _module, _given, out: out + out.roll(1, 1))
    assert "mixes tokens elsewhere" in check_documents(model.model).fault


def check(
    model: Any,
    expected: Any,
    losses: Sequence[torch.Tensor],
    ids: torch.Tensor,
    lengths_of_rows: Sequence[Sequence[int]],
) -> None:
    """Compares with one document after another."""
    total = torch.zeros(())
    for row, lengths in zip(ids, lengths_of_rows, strict=True):
        for document in row.split(list(lengths)):
            logits = expected(input_ids=document[None], use_cache=False).logits
            total = total + loss_of(logits, document[None])
    total.backward()
    assert float(sum(losses)) == pytest.approx(float(total), rel=1e-5)
    # float32 through two layers and a softmax of other order: some hundred roundings.
    assert_gradients(model, expected, 2e-5)
