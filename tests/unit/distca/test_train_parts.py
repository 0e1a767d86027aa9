"""The trainer's parts that need no service: model, feed, agreement, differences, measurements."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from core_attention.ca_task import MaskKind, TaskTable
from core_attention.manifest import Manifest, RankManifest
from core_attention.plan import PhaseForecast, Plan, PlanServer
from core_attention.shape import AttentionShape, format_shape, parse_shape
from distca.apps.data.batch import rank_batches
from distca.apps.data.packing import BatchShape
from distca.apps.data.settings import DataSettings
from distca.apps.local.launcher import configured_shape
from distca.apps.report.measurements import StepMeasurements, tick_imbalance
from distca.apps.report.record import Verification
from distca.apps.train.feed import Feed
from distca.apps.train.loss import summed_loss
from distca.apps.train.model import attention_shape, build_model, model_config
from distca.apps.train.ranks import RankEnvironment, check_agreement, process_group, sum_over_ranks
from distca.apps.train.settings import ModelSettings, TrainingSettings
from distca.apps.train.verify import Verifier, relative_difference
from distca.contract.codec import plan_to_proto
from distca.errors import DataError, ModelConfigError, RanksDisagreeError
from distca.v1 import jobs_pb2

TINY = ModelSettings(hidden_size=16, layers=1, heads=4, kv_heads=2)
ONE_RANK = BatchShape(n_ranks=1, n_nano_batches=1, nano_batch_tokens=24)


def text_folder(tmp_path: Path, lengths: list[int]) -> DataSettings:
    for index, length in enumerate(lengths):
        (tmp_path / f"{index}.txt").write_text("".join(chr(97 + i % 26) for i in range(length)))
    return DataSettings(data=tmp_path)


def test_small_llama_has_the_shape_that_servers_are_told() -> None:
    config = model_config(TINY, max_positions=64)
    assert config.model_type == "llama"
    assert attention_shape(config, "float32") == configured_shape(TINY)
    assert parse_shape(format_shape(configured_shape(TINY))) == configured_shape(TINY)


def test_model_from_json_takes_its_own_sizes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}
    path.write_text(json.dumps({**fields, **heads, "intermediate_size": 64}))
    settings = ModelSettings(model_config=path)
    shape = AttentionShape(num_heads=4, num_heads_kv=1, head_dim=16, head_dim_v=16, dtype="float32")
    assert configured_shape(settings) == shape
    model = build_model(model_config(settings, 64), attention="sdpa", dtype="float32", seed=0)
    assert type(model).__name__ == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "this is no JSON"),
        ("{}", "no model_type"),
        ('{"model_type": "no-such-model"}', "no-such-model"),
        ('{"model_type": "llama", "vocab_size": 100}', "vocab_size is 100"),
        ('{"model_type": "llama", "max_position_embeddings": 8}', "but documents may have 64"),
    ],
)
def test_bad_model_json_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ModelConfigError, match=message):
        model_config(ModelSettings(model_config=path), max_positions=64)


def test_model_without_a_causal_head_is_named() -> None:
    from transformers import AutoConfig

    with pytest.raises(ModelConfigError, match="model type 'vit'"):
        build_model(AutoConfig.for_model("vit"), attention="sdpa", dtype="float32", seed=0)


def test_building_a_second_model_leaves_the_attention_of_the_first() -> None:
    """Both share one configuration object: a verifier must not change what it verifies."""
    config = model_config(TINY, max_positions=64)
    first = build_model(config, attention="eager", dtype="float32", seed=0)
    build_model(config, attention="sdpa", dtype="float32", seed=0)
    assert first.config._attn_implementation == "eager"


def test_equal_seeds_give_equal_weights() -> None:
    config = model_config(TINY, max_positions=64)
    first, same, other = (
        build_model(config, attention="sdpa", dtype="float32", seed=seed).state_dict()
        for seed in (1, 1, 2)
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])


def test_feed_logs_the_documents_that_it_cuts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        feed = Feed(text_folder(tmp_path, [10, 100, 30]), ONE_RANK)
    assert "at most 24 tokens: 1.txt (100 tokens), 2.txt (30 tokens)" in caplog.text
    assert feed.max_document_tokens == 24
    assert feed.description == f"{tmp_path}: 3 documents, 140 tokens"


def test_step_with_nothing_to_predict_is_named(tmp_path: Path) -> None:
    feed = Feed(text_folder(tmp_path, [1, 1]), ONE_RANK)
    with pytest.raises(DataError, match="all 24 documents of step 5 have one token"):
        feed.packed(5)


def test_learning_rate_rises_and_stays() -> None:
    settings = TrainingSettings(learning_rate=1.0, warmup_steps=3)
    assert [settings.learning_rate_at(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(("every", "steps"), [(1, [*range(10)]), (4, [0, 4, 8, 9]), (20, [0, 9])])
def test_the_first_step_and_the_last_are_verified_and_some_between(
    every: int, steps: list[int]
) -> None:
    settings = TrainingSettings(steps=10, verify=True, verify_every=every)
    assert [step for step in range(10) if settings.is_verified(step)] == steps
    unverified = TrainingSettings(steps=10, verify_every=every)
    assert not any(map(unverified.is_verified, range(10)))


@pytest.mark.parametrize(
    ("found", "expected", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], float("inf")),
    ],
)
def test_relative_difference(found: list[float], expected: list[float], difference: float) -> None:
    measured = relative_difference(
        torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    )
    assert measured == pytest.approx(difference, rel=1e-12)


def test_differences_of_tiny_gradients_count_relative_to_the_floor() -> None:
    found, expected = torch.tensor([3.0e-6]), torch.tensor([2.0e-6])
    assert relative_difference(found, expected, floor=1e-3) == pytest.approx(1e-3)
    assert relative_difference(found, expected, floor=1e-9) == pytest.approx(0.5)


def test_missing_gradient_differs_without_bound() -> None:
    assert relative_difference(None, None) == 0.0
    assert relative_difference(None, torch.ones(1)) == float("inf")


@pytest.fixture
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The process group that one rank forms with itself."""
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    environment = RankEnvironment(rank=0, n_ranks=1, init_method=f"file://{store}")
    with process_group(environment, timeout_seconds=10.0):
        yield


def one_step(feed: Feed, model: nn.Module) -> float:
    """Packed, with eager attention and transformers' own block-diagonal mask."""
    packed = feed.packed(0)
    (batch,) = rank_batches(packed, feed.corpus, 0)
    output = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    loss = summed_loss(output.logits, batch) / packed.predicted_tokens
    loss.backward()
    return float(loss.detach())


@pytest.mark.usefixtures("one_rank")
def test_verifier_agrees_with_packed_eager_attention_and_sees_a_wrong_gradient(
    tmp_path: Path,
) -> None:
    feed = Feed(text_folder(tmp_path, [5, 9, 30]), ONE_RANK)
    config = model_config(TINY, max_positions=24)
    model = build_model(config, attention="eager", dtype="float32", seed=0)
    loss = one_step(feed, model)
    verifier = Verifier(config, "float32", feed.corpus, rank=0)

    def compare(loss: float) -> Verification:
        gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
        verifier.compare(feed.packed(0), loss, model.state_dict(), gradients)
        return verifier.result

    assert compare(loss).passed
    assert verifier.result.steps == 1
    parameter = model.get_parameter("model.layers.0.self_attn.v_proj.weight")
    assert parameter.grad is not None
    parameter.grad[0, 0] += 1e-3 * parameter.grad.abs().max()
    found = compare(loss * (1 + 1e-4))
    assert found.parameter == "model.layers.0.self_attn.v_proj.weight"
    assert found.gradient == pytest.approx(1e-3, rel=0.05)
    assert found.loss == pytest.approx(1e-4, rel=0.05)
    assert not found.passed
    parameter.grad[0, 0] = float("nan")
    assert not compare(loss).passed


def test_verifier_refuses_models_that_draw_random_numbers(tmp_path: Path) -> None:
    feed = Feed(text_folder(tmp_path, [5, 9, 30]), ONE_RANK)
    config = model_config(TINY, max_positions=24)
    config.summary_first_dropout = 0.1
    Verifier(config, "float32", feed.corpus, rank=0)
    config.hidden_dropout = 0.1
    with pytest.raises(ModelConfigError, match=r"--verify .* hidden_dropout=0\.1"):
        Verifier(config, "float32", feed.corpus, rank=0)


@pytest.mark.usefixtures("one_rank")
def test_sums_and_agreement_over_ranks() -> None:
    assert sum_over_ranks(1.5, 2.0) == [1.5, 2.0]
    check_agreement({"documents": "abc"})


def test_ranks_that_disagree_are_told_about_what(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(everyone: list[object], mine: object) -> None:
        everyone[:] = [mine, {"documents": "other"}]

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(RanksDisagreeError, match=r"documents: \['abc', 'other'\]"):
        check_agreement({"documents": "abc"})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "MASTER_ADDR": "h"}, "WORLD_SIZE is ''"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "rank 2 is not one of 2 ranks"),
    ],
)
def test_bad_rank_environment_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankEnvironment.from_environ(environ, "env://")


@pytest.mark.parametrize("rendezvous", ["bogus://x", "nonsense", "tcp://h", "tcp://h:x", "file://"])
def test_an_unknown_rendezvous_is_named(rendezvous: str) -> None:
    with pytest.raises(ValueError, match=f"rendezvous is '{rendezvous}'; valid are env://"):
        RankEnvironment.from_environ({"RANK": "0", "WORLD_SIZE": "1"}, rendezvous)


def test_ranks_that_meet_in_a_file_need_no_address() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2"}
    ranks = RankEnvironment.from_environ(environ, "file:///tmp/x")
    assert (ranks.rank, ranks.n_ranks) == (1, 2)


def test_imbalance_adds_the_slowest_of_every_tick() -> None:
    assert tick_imbalance(np.array([[1.0, 3.0], [3.0, 1.0]])) == 1.5
    assert tick_imbalance(np.array([[2.0, 2.0]])) == 1.0
    assert tick_imbalance(np.zeros((2, 2))) == 1.0


def planned_step() -> Plan:
    """Rank 0 holds a document of 8 rows, rank 1 one of 4; server b takes half of the first."""
    manifest = Manifest.merge(
        [RankManifest.from_lengths(3, 0, [[8]]), RankManifest.from_lengths(3, 1, [[4]])], 2
    )
    tasks = TaskTable(
        np.array([0, 0, 1]), np.array([0, 4, 0]), np.array([4, 8, 4]), np.array([0, 1, 1])
    )
    forecast = PhaseForecast(
        home_seconds=np.array([[3.0, 1.0]]),
        seconds=np.array([[2.0, 2.0]]),
        q_rows=np.array([[4, 8]]),
        kv_rows=np.array([[4, 12]]),
        bytes_in=np.zeros((1, 2), dtype=np.int64),
        bytes_out=np.zeros((1, 2), dtype=np.int64),
    )
    return Plan(
        manifest=manifest,
        epoch=0,
        servers=(PlanServer("a", 0, "h:1"), PlanServer("b", None, "h:2")),
        forward=tasks,
        backward=tasks,
        mask=MaskKind.CAUSAL,
        planner="test",
        reason="because",
        forward_forecast=forecast,
        backward_forecast=forecast,
    )


def step_response(*server_ids: str) -> jobs_pb2.GetStepResponse:
    return jobs_pb2.GetStepResponse(
        plan=plan_to_proto(planned_step(), "job"),
        plan_seconds=0.5,
        servers=[
            jobs_pb2.ServerMeasurement(
                server_id=name, forward_busy_seconds=[1.0], backward_busy_seconds=[2.0]
            )
            for name in server_ids
        ],
    )


def test_measurements_are_complete_when_every_server_with_work_has_reported() -> None:
    assert StepMeasurements.from_proto(step_response("a")).measured_seconds is None
    found = StepMeasurements.from_proto(step_response("b", "a"))
    assert found.measured_seconds is not None
    assert found.measured_seconds.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert tick_imbalance(found.home_seconds) == 1.5
    assert (tick_imbalance(found.planned_seconds), found.measured_imbalance) == (1.0, 1.0)


def test_detail_is_of_all_layers() -> None:
    detail = StepMeasurements.from_proto(step_response("a", "b")).detail(3, [])
    assert detail.home_seconds == (18.0, 6.0)
    assert detail.planned_seconds == (12.0, 12.0)
    assert detail.measured_seconds == (3.0, 3.0)
    assert (detail.documents, detail.longest_document_tokens) == (2, 8)
    assert detail.reason == "because"
