"""The trainer's parts that need no service: devices, agreement, differences, measurements."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from control_plane.planner.planning import PlanningOptions
from core_attention.manifest import Manifest, RankManifest
from distca.apps.report.measurements import StepMeasurements, tick_imbalance
from distca.apps.train.ranks import (
    check_agreement,
    choose_device,
    process_group,
)
from distca.apps.train.settings import DeviceName, ModelSettings, TrainingSettings
from distca.apps.train.trainer import build_model
from distca.apps.train.verify import Verifier, relative_difference
from distca.contract.codec import plan_to_proto
from distca.errors import DistcaError
from distca.v1 import jobs_pb2
from tests.support.service_harness import SHAPE, planning_server, rotating_plan

TINY = ModelSettings(hidden_size=16, layers=1, heads=4, kv_heads=2)
CPU = torch.device("cpu")


@pytest.mark.parametrize(("every", "steps"), [(1, [*range(10)]), (4, [0, 4, 8, 9]), (20, [0, 9])])
def test_the_first_step_and_the_last_are_verified_and_some_between(
    every: int, steps: list[int]
) -> None:
    settings = TrainingSettings(steps=10, verify=True, verify_every=every)
    assert [step for step in range(10) if settings.is_verified(step)] == steps
    unverified = TrainingSettings(steps=10, verify_every=every)
    assert not any(map(unverified.is_verified, range(10)))


@pytest.mark.parametrize(
    ("name", "n_devices", "expected"),
    [
        (DeviceName.CPU, 4, "cpu"),
        (DeviceName.AUTO, 0, "cpu"),
        (DeviceName.AUTO, 4, "cuda:2"),
        (DeviceName.CUDA, 4, "cuda:2"),
        (DeviceName.AUTO, 2, None),
        (DeviceName.CUDA, 0, None),
    ],
)
def test_device_is_that_of_the_local_rank(
    monkeypatch: pytest.MonkeyPatch, name: DeviceName, n_devices: int, expected: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_devices)
    made_current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    if expected is None:
        with pytest.raises(DistcaError):
            choose_device(name, local_rank=2)
        return
    device = choose_device(name, local_rank=2)
    assert device == torch.device(expected)
    assert made_current == ([device] if device.type == "cuda" else [])


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
    assert relative_difference(None, None) == 0.0
    assert relative_difference(None, torch.ones(1)) == float("inf")


@pytest.fixture
def one_rank(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The process group that one rank forms with itself."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    with process_group(f"file://{store}", 10.0, CPU):
        yield


@pytest.mark.usefixtures("one_rank")
def test_verifier_agrees_with_packed_eager_attention_and_sees_a_wrong_gradient() -> None:
    documents = [torch.randint(256, (length,)) for length in (5, 9, 10)]
    model = build_model(TINY, 24, attention="eager", dtype="float32", device=CPU)
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    ids = torch.cat(documents)
    labels = torch.where(positions == 0, -100, ids)
    loss = model(ids[None], position_ids=positions[None], labels=labels[None]).loss
    loss.backward()
    local = build_model(TINY, 24, attention="sdpa", dtype="float64", device=CPU)
    verifier = Verifier(local, "float32")

    def compare(factor: float) -> None:
        gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
        verifier.compare(documents, 21, factor * loss.item(), model.state_dict(), gradients)

    compare(1.0)
    assert verifier.result.passed
    assert verifier.result.steps == 1
    name = "model.layers.0.self_attn.v_proj.weight"
    parameter = model.get_parameter(name)
    assert parameter.grad is not None
    parameter.grad[0, 0] += 1e-3 * parameter.grad.abs().max()
    compare(1 + 1e-4)
    assert verifier.result.parameter == name
    assert verifier.result.gradient == pytest.approx(1e-3, rel=0.05)
    assert verifier.result.loss == pytest.approx(1e-4, rel=0.05)
    assert not verifier.result.passed
    parameter.grad[0, 0] = float("nan")
    compare(1.0)
    compare(float("nan"))
    parameter.grad[0, 0] = 0.0
    compare(1.0)
    assert not verifier.result.passed
    assert np.isnan([verifier.result.gradient, verifier.result.loss]).all()


def test_ranks_that_disagree_are_told_about_what(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(everyone: list[object], mine: object) -> None:
        everyone[:] = [mine, {"documents": "other"}]

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(DistcaError):
        check_agreement({"documents": "abc"})


def test_imbalance_adds_the_slowest_of_every_tick() -> None:
    assert tick_imbalance(np.array([[1.0, 3.0], [3.0, 1.0]])) == 1.5
    assert tick_imbalance(np.array([[2.0, 2.0]])) == 1.0
    assert tick_imbalance(np.zeros((2, 2))) == 1.0


def step_response(*server_ids: str) -> jobs_pb2.GetStepResponse:
    """A step of documents of 8 and 4 rows, of which these servers have reported."""
    manifests = [RankManifest.from_lengths(3, rank, [[8 - 4 * rank]]) for rank in range(2)]
    servers = [*map(planning_server, "ab")]
    plan = rotating_plan(Manifest.merge(manifests, 2), servers, SHAPE, PlanningOptions())
    return jobs_pb2.GetStepResponse(
        plan=plan_to_proto(plan, "job"),
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
    assert tick_imbalance(found.home_seconds) == found.measured_imbalance == 1.0
    assert tick_imbalance(found.planned_seconds) == pytest.approx(4 / 3)


def test_detail_is_of_all_layers() -> None:
    detail = StepMeasurements.from_proto(step_response("a", "b")).detail(7, 3)
    assert detail.step == 7
    assert detail.home_seconds == (6.0, 6.0)
    assert detail.planned_seconds == (12.0, 6.0)
    assert detail.measured_seconds == (3.0, 3.0)
    assert (detail.documents, detail.longest_document_tokens) == (2, 8)
    assert detail.reason == "segments take turns"
