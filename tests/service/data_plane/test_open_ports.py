"""Which TCP ports a transport opens, and on which addresses: what strangers could reach."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import psutil
import pytest

from data_plane.base_transport import say_that_ports_are_open
from data_plane.listening_address import accept_only_at, accept_only_from
from data_plane.nixl.settings import NixlSettings
from data_plane.transport import Address, ConnectFailed
from data_plane.ucxx.settings import UcxxSettings
from data_plane.ucxx.transport import UcxxTransport
from tests.service.data_plane.secret import SECRET, proven
from tests.support.addresses import foreign_address

LOOPBACK = "127.0.0.1"
_DROPPED_SECONDS = 0.3
"""A dropped SYN is never answered; an answer on this machine takes microseconds."""


def listening_addresses() -> set[tuple[str, int]]:
    """The addresses and ports that this process listens on."""
    return {
        (each.laddr.ip, each.laddr.port)
        for each in psutil.Process().net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }


@pytest.fixture
def ports_before() -> set[tuple[str, int]]:
    return listening_addresses()


@pytest.fixture(params=[True, False], ids=["one-host", "several-hosts"])
def transport(
    request: pytest.FixtureRequest, ports_before: set[tuple[str, int]]
) -> Iterator[UcxxTransport]:
    transport = UcxxTransport(UcxxSettings(one_host=request.param, data_host=LOOPBACK))
    with closing(transport):
        yield transport


def test_ucx_opens_ports_at_the_data_address_alone(
    transport: UcxxTransport, ports_before: set[tuple[str, int]]
) -> None:
    opened = listening_addresses() - ports_before
    assert {ip for ip, _ in opened} == {LOOPBACK}


def test_the_listener_answers_at_the_data_address_alone(transport: UcxxTransport) -> None:
    address = transport.listen(LOOPBACK, 0, proven())
    socket.create_connection((LOOPBACK, address.port), 5.0).close()
    for elsewhere in ("127.0.0.2", foreign_address()):
        with pytest.raises(TimeoutError):
            socket.create_connection((elsewhere, address.port), _DROPPED_SECONDS)


def test_a_way_by_another_interface_is_refused_with_what_to_do(transport: UcxxTransport) -> None:
    elsewhere = foreign_address()
    with pytest.raises(ConnectFailed, match=f"data_host {LOOPBACK}.*--data-host {elsewhere}"):
        transport.connect(Address(elsewhere, 7710), b"", 5.0, secret=SECRET)


@pytest.mark.parametrize("settings", [UcxxSettings, NixlSettings])
def test_the_users_devices_win(settings: Any) -> None:
    bound = settings(data_host=LOOPBACK)
    assert bound.context_options({})["NET_DEVICES"].split(",")[-1] == "lo"
    assert "NET_DEVICES" not in bound.context_options({"UCX_NET_DEVICES": "eth7"})
    for everywhere in (None, "0.0.0.0"):
        assert "NET_DEVICES" not in settings(data_host=everywhere).context_options({})


def test_rdma_devices_stay_beside_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ucxx.settings", "nixl.settings"):
        monkeypatch.setattr(f"data_plane.{module}.usable_rdma_devices", lambda: ("mlx5_0:1",))

    def devices(settings: UcxxSettings | NixlSettings) -> str:
        return settings.context_options({})["NET_DEVICES"]

    assert devices(UcxxSettings(data_host=LOOPBACK, rdma=True)) == "mlx5_0:1,lo"
    assert devices(UcxxSettings(data_host=LOOPBACK)) == "lo"
    assert devices(NixlSettings(data_host=LOOPBACK)) == "mlx5_0:1,lo"


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
@pytest.mark.parametrize("settings", [UcxxSettings, NixlSettings])
def test_an_address_on_no_interface_is_an_error_not_every_interface(
    settings: Any, host: str
) -> None:
    with pytest.raises(ValueError):
        settings(data_host=host).context_options({})
    # Whoever names the interfaces needs no address.
    assert settings(data_host=host).context_options({"UCX_NET_DEVICES": "eth7"})
    named = settings(data_host=host, options={"NET_DEVICES": "lo"})
    assert named.context_options({})["NET_DEVICES"] == "lo"


def test_a_filter_leaves_no_descriptor_behind_and_needs_a_listener() -> None:
    with closing(socket.create_server(("0.0.0.0", 0))) as listener:
        port = listener.getsockname()[1]
        descriptors = len(os.listdir("/proc/self/fd"))
        listener.setblocking(False)
        accept_only_at(LOOPBACK, port)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        # UCX takes clients in until there are no more; it must not wait for them.
        assert not os.get_blocking(listener.fileno())
    with pytest.raises(OSError):
        accept_only_at(LOOPBACK, port)
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1


def test_open_ports_are_spoken_of_once_and_of_loopback_never(
    caplog: pytest.LogCaptureFixture,
) -> None:
    say_that_ports_are_open.cache_clear()
    said = []
    for host in (LOOPBACK, foreign_address(), foreign_address()):
        with closing(UcxxTransport(UcxxSettings(data_host=host))) as transport:
            transport.listen(host, 0, proven())
        said.append(sum(record.levelname == "WARNING" for record in caplog.records))
    assert said == [0, 1, 1]
    assert foreign_address() in caplog.text


def test_a_listener_takes_connections_from_those_that_are_admitted_alone() -> None:
    def answers(source: str) -> bool:
        with suppress(OSError):
            address = (LOOPBACK, listener.getsockname()[1])
            socket.create_connection(address, _DROPPED_SECONDS, (source, 0)).close()
            return True
        return False

    member, stranger = "127.0.0.2", "127.0.0.9"
    with socket.create_server((LOOPBACK, 0)) as listener:
        accept_only_from([LOOPBACK], listener.getsockname()[1])
        assert [answers(each) for each in (LOOPBACK, member, stranger)] == [True, False, False]
        accept_only_from([LOOPBACK, member], listener.getsockname()[1])
        assert [answers(each) for each in (LOOPBACK, member, stranger)] == [True, True, False]
        many = [f"10.{each >> 8}.{each & 255}.1" for each in range(5000)]
        with pytest.raises(OSError) as refused:
            accept_only_from(many, listener.getsockname()[1])
        assert refused.value.errno in (errno.EINVAL, errno.ENOMEM)
        # Rather open than deaf to a member.
        assert answers(member)
