"""Addresses of network interfaces, by their names."""

from __future__ import annotations

import functools
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from attention_node.settings import NodeSettings
from core_attention.shape import parse_shape
from data_plane.addresses import local_ip, resolve
from data_plane.interfaces import address_of_interface, interface_of_host, own_address
from data_plane.transport import Address, ConnectFailed, TransportError
from distca.apps.doctor.settings import DoctorSettings
from distca.apps.train.settings import ServiceSettings
from tests.support.errors import refused
from trainer_client import SessionOptions

SHAPE = parse_shape("8:2:64:float32")
node = functools.partial(NodeSettings, control_plane="cp:7700", profile_shapes=(SHAPE,))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a pod's network, a data network, and an interface that has a link address alone."""

    def address(family: socket.AddressFamily, text: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=text)

    ip4, ip6 = socket.AF_INET, socket.AF_INET6
    found = {
        "eth0": [address(ip4, "10.1.0.7")],
        "net1": [address(ip6, "fe80::1"), address(ip4, "192.168.9.7"), address(ip4, "1.2.3.4")],
        "ib0": [address(ip6, "fe80::2")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


@pytest.mark.usefixtures("machine")
def test_rows_are_exchanged_at_the_interfaces_first_address() -> None:
    settings = node(data_host="10.1.0.7", data_interface="net1")
    assert (settings.rows_host, settings.data_host) == ("192.168.9.7", "10.1.0.7")
    assert DoctorSettings(data_interface="net1").rows_host == "192.168.9.7"
    assert DoctorSettings(data_host="10.1.0.7").rows_host == "10.1.0.7"


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", ["net2", "ib0"])
def test_an_interface_without_an_address_is_refused(name: str) -> None:
    with refused():
        ServiceSettings(control_plane="cp:7700", run_dir=Path("runs/a"), data_interface=name)


def test_this_machine_has_loopback() -> None:
    assert address_of_interface("lo") == "127.0.0.1"


def test_a_machine_whose_name_has_no_address_needs_an_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    with refused():
        node()
    with refused():
        SessionOptions(control_plane="cp:7700", job="j", rank=0, n_ranks=1, n_layers=1, shape=SHAPE)
    assert node(data_host="127.0.0.1").data_host == "127.0.0.1"


@pytest.mark.parametrize("host", ["node..example", "n" * 64])
def test_a_text_that_can_be_no_name_is_refused_like_one_that_is_unknown(host: str) -> None:
    with refused():
        interface_of_host(host)
    with pytest.raises(TransportError):
        local_ip(host, 7710, "ucxx")
    with pytest.raises(ConnectFailed):
        resolve(Address(host, 7710), 5.0, "ucxx")


def test_an_empty_data_host_is_refused_and_not_taken_for_all_interfaces() -> None:
    for settings in (
        node,
        DoctorSettings,
        functools.partial(ServiceSettings, control_plane="cp:7700", run_dir=Path("runs/a")),
    ):
        with refused():
            settings(data_host="")


def test_a_machines_own_address_is_that_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert own_address() == "127.0.0.1"


@pytest.mark.parametrize("hosts_file", [{"box": "127.0.1.1"}, {}])
def test_where_the_name_is_loopback_it_is_the_address_towards_the_control_plane(
    monkeypatch: pytest.MonkeyPatch, hosts_file: dict[str, str]
) -> None:
    """As Debian and Ubuntu write /etc/hosts, and as a machine that nobody has entered."""
    known = {**hosts_file, "cp": "10.1.0.1", "1.2.3.4": "1.2.3.4"}

    def look_up(name: str) -> str:
        if name not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return known[name]

    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "gethostbyname", look_up)
    monkeypatch.setattr(
        "data_plane.interfaces.source_ip",
        {"10.1.0.1": "10.1.0.7"}.get,  # no route to 1.2.3.4
    )
    where = "nowhere:7700,1.2.3.4:7700,cp:7700"
    job: dict[str, Any] = {"job": "j", "rank": 0, "n_ranks": 1, "n_layers": 1}
    assert node(control_plane=where).data_host == "10.1.0.7"
    assert SessionOptions(control_plane=where, shape=SHAPE, **job).data_host == "10.1.0.7"
    train = functools.partial(ServiceSettings, run_dir=Path("run"))
    assert train(control_plane=where).rows_host == "10.1.0.7"
    assert train(control_plane=where, one_host=True).rows_host == "127.0.0.1"
    assert train(control_plane="nowhere:7700").rows_host == "127.0.0.1"
    assert DoctorSettings().located(["cp"]).rows_host == "10.1.0.7"
    assert DoctorSettings().located([]).rows_host == hosts_file.get("box", "127.0.0.1")
    assert DoctorSettings(data_host="10.1.0.9").located(["cp"]).rows_host == "10.1.0.9"
    if hosts_file:
        assert own_address(towards=["nowhere", "1.2.3.4"]) == "127.0.1.1"
