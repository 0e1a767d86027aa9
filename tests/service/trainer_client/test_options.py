"""Options of a session: what people write for them, and what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainer_client
from tests.cluster.trainer_client.model_sweep import make_model
from tests.cluster.trainer_client.test_options_of_models import JOB, llama
from tests.support.cluster import NODE_SHAPE, Cluster
from tests.support.model_options import options_for
from tests.support.team import Team
from tests.support.tiny_models import tiny_config
from trainer_client import Placement, Session, SessionOptions


def options(**given: Any) -> SessionOptions:
    usual = {"control_plane": "cp:7700", "job": "j", "rank": 0, "n_ranks": 2, "n_layers": 1}
    return SessionOptions(**{**usual, "shape": NODE_SHAPE, "data_host": "127.0.0.1", **given})


def test_all_names_that_the_package_lists_are_there() -> None:
    assert {"Session", "measure_stages"} <= set(dir(trainer_client))
    for name in dir(trainer_client):
        assert getattr(trainer_client, name, None) is not None


def test_paths_devices_and_numbers_may_be_of_kindred_types() -> None:
    made = options(
        profile_dir="profiles",
        ca_file="ca.pem",
        device=torch.device("cpu"),
        placement="mixed",
        rank=np.int64(1),
    )
    assert (made.profile_dir, made.ca_file) == (Path("profiles"), Path("ca.pem"))
    assert made.device == "cpu"
    assert made.checks_results
    assert made.placement is Placement.MIXED
    assert made.rank == 1


@pytest.mark.parametrize(
    "given",
    [
        # As os.environ["RANK"] gives it.
        {"rank": "1"},
        {"n_ranks": 2.5},
        {"rank": 2},
        {"data_port": "7"},
        {"tolerance": "0.1"},
        {"plan_timeout_seconds": "9"},
        {"softmax_scale": 0.0},
        {"softmax_scale": -0.5},
        {"softmax_scale": float("nan")},
        {"placement": "poool"},
        {"data_host": ""},
        {"data_host": None},
        {"one_host": "no"},
        {"cut_documents": "false"},
        {"checksums": "0"},
        {"check_results": "no"},
        {"device": "cpux"},
        {"head_groups": 3},
        {"windows": [4, 4]},
        {"windows": [-1]},
    ],
)
def test_what_is_wrong_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        options(**given)


def test_an_address_that_is_none_is_refused_when_the_session_opens() -> None:
    with pytest.raises(ValueError):
        Session.open(options(control_plane="cp"))


def test_a_device_that_is_none_is_refused_when_the_model_is_looked_at() -> None:
    with pytest.raises(ValueError):
        options_for(llama(), **JOB, device="cpux")
    assert options_for(llama(), **JOB, device=torch.device("cpu")).device == "cpu"


@pytest.mark.parametrize(
    ("family", "asked", "windows"),
    [("gemma3_text", False, set()), ("gemma3_text", True, {0, 6}), ("mistral", False, {6})],
)
def test_windows_are_served_where_asked_for_or_where_no_layer_is_full(
    family: str, asked: bool, windows: set[int]
) -> None:
    model = make_model(tiny_config(family), "distca")
    assert set(options_for(model, **JOB, serve_windows=asked).windows) == windows


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu", 0)])
def test_the_cpu_has_one_name(device: Any) -> None:
    # accelerate's name for the CPU of a rank.
    assert options(device=device).device == "cpu"
    assert options_for(llama(), **JOB, device=device).device == "cpu"


@pytest.mark.parametrize(
    "wrong", [{"tick_timeout_seconds": 2.8}, {"collective_timeout_seconds": 100.0}]
)
def test_timeouts_of_one_rank_that_contradict_each_other_are_refused(
    wrong: dict[str, float],
) -> None:
    with pytest.raises(ValueError):
        options(**wrong)


def test_a_shorter_ping_makes_room_for_a_shorter_tick() -> None:
    options(tick_timeout_seconds=2.8, ping_quiet_seconds=0.25)


def test_rank_whose_timeouts_do_not_fit_the_control_planes_is_told(pool_of_four: Cluster) -> None:
    late: dict[str, Any] = {"connect_timeout_seconds": 10.0, "recovery_timeout_seconds": 20.0}
    options(**late)  # By themselves they fit.
    with pytest.raises(ValueError):
        Team(pool_of_four, 1, NODE_SHAPE, placement="pool", **late)
