"""Options of a session: what people write for them, and what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainer_client
from tests.cluster.trainer_client.test_options_of_models import JOB, llama
from tests.support.cluster import NODE_SHAPE
from tests.support.model_options import options_for
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
    ("given", "said"),
    [
        # As os.environ["RANK"] gives it.
        ({"rank": "1"}, r"rank is '1'; it must be an integer, 0 to 1"),
        ({"n_ranks": 2.5}, r"n_ranks is 2.5; it must be an integer, 1 to 65536"),
        ({"rank": 2}, r"rank is 2; it must be 0 to 1"),
        ({"data_port": "7"}, r"data_port is '7'; it must be an integer, 0 to 65535"),
        ({"tolerance": "0.1"}, r"tolerance is '0.1'; it must be 0 or more"),
        ({"plan_timeout_seconds": "9"}, r"plan_timeout_seconds is '9'; it must be a positive"),
        ({"softmax_scale": 0.0}, r"softmax_scale is 0.0; it must be a positive number"),
        ({"softmax_scale": -0.5}, r"softmax_scale is -0.5; it must be a positive number"),
        ({"softmax_scale": float("nan")}, r"softmax_scale is nan; it must be a positive number"),
        ({"placement": "poool"}, r"placement is 'poool'; valid: 'pool', 'in-place', 'mixed'"),
        ({"data_host": ""}, r"data_host is ''; give a name or IPv4 address of this machine"),
        ({"data_host": None}, r"data_host is None; give a name or IPv4 address of this machine"),
        ({"one_host": "no"}, r"one_host is 'no'; it must be True or False"),
        ({"cut_documents": "false"}, r"cut_documents is 'false'; it must be True or False"),
        ({"checksums": "0"}, r"checksums is '0'; it must be True or False"),
        ({"check_results": "no"}, r"check_results is 'no'; it must be True or False"),
        ({"device": "cpux"}, r"device is 'cpux'; give cpu or cuda:INDEX"),
        ({"head_groups": 3}, r"head_groups is 3; "),
    ],
)
def test_what_is_wrong_is_named_with_its_value(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        options(**given)


def test_an_address_that_is_none_is_named_when_the_session_opens() -> None:
    with pytest.raises(ValueError, match=r"control_plane is 'cp'; it must be host:port.* commas"):
        Session.open(options(control_plane="cp"))


def test_a_device_that_is_none_is_named_when_the_model_is_looked_at() -> None:
    with pytest.raises(ValueError, match="device is 'cpux'; give cpu or cuda:INDEX"):
        options_for(llama(), **JOB, device="cpux")
    assert options_for(llama(), **JOB, device=torch.device("cpu")).device == "cpu"


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu", 0)])
def test_the_cpu_has_one_name(device: Any) -> None:
    # accelerate's name for the CPU of a rank.
    assert options(device=device).device == "cpu"
    assert options_for(llama(), **JOB, device=device).device == "cpu"
