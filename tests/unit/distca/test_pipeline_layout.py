"""Pipelines of ``distca train``: what the options ask for, and stages cut out of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_client.models.transformers  # noqa: F401  (registers the attention)
from core_attention.schedule import write_csv
from core_attention.schedule_orders import SCHEDULES
from distca.errors import ModelConfigError, SettingsError
from distca.train.model import build_model, model_config
from distca.train.parallelism import Parallelism
from distca.train.pipeline_layout import PipelineLayout, pipeline_layout
from distca.train.settings import ModelSettings, TrainingSettings
from distca.train.stages import StageModule
from trainer_client.models.document_check import computed_here

TINY = ModelSettings(hidden_size=32, layers=4, heads=4, kv_heads=2)


def layout(n_ranks: int = 4, n_layers: int = 5, **fields: Any) -> PipelineLayout | None:
    fields = {"pipeline_stages": 2, "microbatches": 4, "tokens_per_rank": 64} | fields
    settings = TrainingSettings(**fields)
    return pipeline_layout(settings, Parallelism.of(settings, n_ranks).n_replicas, n_layers)


def test_ranks_form_pipelines() -> None:
    found = layout()
    assert found is not None
    assert found.layers == (3, 2)
    assert found.pipeline_ranks == [0, 1, 0, 1]
    assert [found.layers_of(stage) for stage in range(2)] == [range(3), range(3, 5)]
    assert layout(pipeline_stages=1, microbatches=1) is None


def test_several_stages_a_rank_and_layers_by_hand() -> None:
    found = layout(schedule="interleaved", stage_layers="2,1,1,1")
    assert found is not None
    assert [found.stages_of(rank) for rank in range(2)] == [[0, 2], [1, 3]]
    assert found.layers == (2, 1, 1, 1)


def test_a_schedule_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "zb.csv"
    file.write_text(write_csv(SCHEDULES["zero-bubble"](2, 4)))
    found = layout(schedule=str(file))
    assert found is not None
    assert found.schedule.slots == SCHEDULES["zero-bubble"](2, 4).slots
    with pytest.raises(SettingsError, match=r"for 2 ranks and 4 microbatches; .*--microbatches 8"):
        layout(schedule=str(file), microbatches=8)
    file.write_text("0B0,0F0\n1F0,1B0\n")
    with pytest.raises(SettingsError, match="can never start"):
        layout(schedule=str(file))
    file.write_text("1F0,1B0\n0F0,0B0\n")
    with pytest.raises(SettingsError, match=r"stages on ranks \[1, 0\]"):
        layout(schedule=str(file), microbatches=1)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"n_ranks": 3}, "--pipeline-stages is 2 and there are 3 ranks"),
        ({"n_layers": 1}, "the model has 1 layers for 2 stages"),
        ({"schedule": "1f2b"}, "--schedule is '1f2b'; valid are 1f1b, 1f1b-split, same-phase"),
        ({"schedule": "/nowhere.csv"}, "--schedule /nowhere.csv cannot be read"),
        ({"schedule": "interleaved", "microbatches": 1}, "must be a multiple of the ranks"),
        ({"stage_layers": "3,x"}, "--stage-layers is '3,x'"),
        ({"stage_layers": "5,0"}, "--stage-layers is '5,0'"),
        ({"stage_layers": "3,²"}, "--stage-layers is '3,²'"),
        ({"stage_layers": "3,1,1"}, "gives 5 layers to 3 stages; .* 5 layers, .* 2 stages"),
    ],
)
def test_wrong_pipelines_are_named(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(SettingsError, match=match):
        layout(**changes)


def test_microbatches_go_with_stages() -> None:
    with pytest.raises(ValueError, match="both go with pipeline_stages of 2 or more"):
        TrainingSettings(microbatches=2)
    with pytest.raises(ValueError, match="schedule is 'zero-bubble', and pipeline_stages 1"):
        TrainingSettings(schedule="zero-bubble")
    with pytest.raises(ValueError, match="a step has 128 at most"):
        TrainingSettings(pipeline_stages=2, microbatches=129, tokens_per_rank=129 * 64)
    with pytest.raises(ValueError, match=r"nano_batches \(2\) times microbatches \(3\)"):
        TrainingSettings(pipeline_stages=2, microbatches=3, tokens_per_rank=100)


def test_stages_together_are_the_model() -> None:
    config = model_config(TINY, max_positions=16)
    ids = torch.arange(8)[None]
    whole = build_model(config, attention="distca", dtype="float32", seed=3)
    names = {name for name, _ in whole.named_parameters()}
    with torch.no_grad(), computed_here(whole, 8):
        expected = whole(input_ids=ids, position_ids=ids, use_cache=False, labels=ids)
    given, found = ids, set()
    for layers in (range(1), range(1, 3), range(3, 4)):
        model = build_model(config, attention="distca", dtype="float32", seed=3)
        stage = StageModule(model, layers, chunk_rows=3)
        found |= {stage.whole_name(name) for name, _ in model.named_parameters()}
        assert stage.tied_names == ("model.embed_tokens.weight", "lm_head.weight")
        with torch.no_grad(), computed_here(model, 8):
            given = stage(given, position_ids=ids, labels=ids.roll(-1, 1))
    logits = expected.logits[0]
    loss = torch.nn.functional.cross_entropy(logits, ids[0].roll(-1), reduction="sum")
    torch.testing.assert_close(given, loss[None])
    # The head is the embedding's weight in the whole model, and has a name of its own here.
    assert found == names | {"lm_head.weight"}


def test_a_model_that_cannot_be_cut_is_named() -> None:
    config = model_config(TINY, max_positions=16)
    model: Any = build_model(config, attention="distca", dtype="float32", seed=3)
    model.base_model.last_of_all = model.base_model.norm
    forward = model.base_model.forward
    # Something that only the first stage may do.
    model.base_model.forward = lambda **inputs: _scaled(forward(**inputs))
    with pytest.raises(ModelConfigError, match="'llama' cannot be cut into stages: layers 0 to 1"):
        StageModule(model, range(2), chunk_rows=3)


def _scaled(output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state * 2
    return output
