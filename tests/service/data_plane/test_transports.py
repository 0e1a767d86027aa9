"""Transports are chosen by name."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from attention_node.settings import NodeSettings
from core_attention.shape import AttentionShape
from data_plane import transports
from data_plane.metrics import DataPlaneMetrics
from data_plane.rdma import rdma_ports
from data_plane.transport import TransportName, check_transport
from data_plane.transport_choice import choose_transport
from data_plane.transport_facts import TransportFacts, transport_facts
from data_plane.transports import open_transport, resolve_transport
from distca.apps.doctor.responder import ResponderSettings
from distca.apps.doctor.settings import DoctorSettings
from tests.support.rdma_machine import add_rdma_device
from trainer_client import SessionOptions

SHAPE = AttentionShape(num_heads=2, num_heads_kv=1, head_dim=64, head_dim_v=64, dtype="float32")


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "_LOADED", transports._Loaded())


def test_a_name_opens_its_transport_and_no_other_one_in_the_same_process() -> None:
    transport = open_transport("ucxx", device="cpu", one_host=True)
    try:
        assert transport.name == TransportName.UCXX
        with pytest.raises(RuntimeError):
            open_transport("nixl", device="cpu", one_host=True)
    finally:
        transport.close()


def test_other_names_are_refused_wherever_they_can_be_given() -> None:
    job = SessionOptions(
        control_plane="localhost:1", job="job", rank=0, n_ranks=1, n_layers=1, shape=SHAPE
    )
    for taken in (
        check_transport,
        partial(open_transport, device="cpu", one_host=True),
        lambda name: replace(job, transport=name),
        lambda name: NodeSettings(control_plane="a:1", profile_shapes=(SHAPE,), transport=name),
        lambda name: DoctorSettings(transport=name),
        lambda name: ResponderSettings(host="127.0.0.1", transport=name),
    ):
        with pytest.raises(ValueError):
            taken("mpi")


@pytest.fixture
def rdma_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container on a machine with InfiniBand that was given no device."""
    root = add_rdma_device(tmp_path, verbs=False)
    facts = partial(transport_facts, root, {})
    monkeypatch.setattr("data_plane.transports.transport_facts", facts)


@pytest.mark.usefixtures("rdma_machine")
@pytest.mark.parametrize(
    ("name", "one_host", "rdma"),
    [("auto", False, "idle"), ("auto", True, "none"), ("ucxx", False, "none")],
)
def test_tcp_beside_rdma_devices_is_a_warning_and_a_metric(
    name: str, one_host: bool, rdma: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()
    with caplog.at_level(logging.INFO, "data_plane.transports"):
        transport = open_transport(
            name, device="cpu", one_host=one_host, metrics=DataPlaneMetrics(registry)
        )
        transport.close()
    assert transport.name == TransportName.UCXX
    labels = {"transport": "ucxx", "rdma": rdma}
    assert registry.get_sample_value("distca_data_plane_transport_info", labels) == 1
    assert caplog.records[0].message.startswith("transport ucxx: ")
    warnings = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == (rdma == "idle")
    if warnings:
        assert "no /dev/infiniband/uverbs* of mlx5_0 opens" in warnings[0]
        assert "rdma.resourceName" in warnings[0]


def test_auto_stays_with_what_the_process_has_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second session of a process cannot open another library."""
    open_transport("ucxx", device="cpu", one_host=True).close()
    facts = TransportFacts(ports=rdma_ports(add_rdma_device(tmp_path)))
    monkeypatch.setattr("data_plane.transports.transport_facts", lambda: facts)
    assert choose_transport(facts, one_host=False).name == TransportName.NIXL
    assert resolve_transport("auto", one_host=False).name == TransportName.UCXX


def test_without_the_library_there_is_no_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find_nothing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("data_plane.nixl.agent.importlib.import_module", find_nothing)
    with pytest.raises(ImportError):
        open_transport("nixl", device="cpu", one_host=True)
