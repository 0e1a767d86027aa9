"""Transports are chosen by name."""

from __future__ import annotations

import pytest

from attention_node.server import NodeSettings
from core_attention.shape import AttentionShape
from data_plane import transports
from data_plane.transports import TransportName, check_transport, open_transport
from distca.doctor.responder import ResponderSettings
from distca.doctor.surroundings import DoctorSettings
from trainer_client import SessionOptions

SHAPE = AttentionShape(num_heads=2, num_heads_kv=1, head_dim=64, head_dim_v=64, dtype="float32")


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "_LOADED", transports._Loaded())


def test_a_name_opens_its_transport_and_no_other_one_in_the_same_process() -> None:
    transport = open_transport("ucxx", device="cpu", one_host=True)
    try:
        assert transport.name == TransportName.UCXX
        with pytest.raises(RuntimeError, match="use one of them in a process"):
            open_transport("nixl", device="cpu", one_host=True)
    finally:
        transport.close()


def test_other_names_are_refused_wherever_they_can_be_given() -> None:
    wrong = r"transport is 'mpi'; valid: 'ucxx', 'nixl'"
    with pytest.raises(ValueError, match=wrong):
        check_transport("mpi")
    with pytest.raises(ValueError, match=wrong):
        open_transport("mpi", device="cpu", one_host=True)
    with pytest.raises(ValueError, match=wrong):
        NodeSettings(control_plane="localhost:1", profile_shapes=(SHAPE,), transport="mpi")
    with pytest.raises(ValueError, match=wrong):
        DoctorSettings(transport="mpi")
    with pytest.raises(ValueError, match=wrong):
        ResponderSettings(host="127.0.0.1", transport="mpi")
    with pytest.raises(ValueError, match=wrong):
        SessionOptions(
            control_plane="localhost:1",
            job="job",
            rank=0,
            n_ranks=1,
            n_layers=1,
            shape=SHAPE,
            transport="mpi",
        )


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find_nothing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("data_plane.nixl_agent.importlib.import_module", find_nothing)
    with pytest.raises(ImportError, match="nixl-cu13"):
        open_transport("nixl", device="cpu", one_host=True)
