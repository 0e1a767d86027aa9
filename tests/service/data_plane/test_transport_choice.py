"""``--transport auto``: what a machine offers, which transport follows, and in which words."""

from __future__ import annotations

import itertools
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_plane import transport_facts as facts_module
from data_plane.rdma import MIN_LOCKED_BYTES, RdmaPort, locked_bytes_limit, rdma_ports
from data_plane.transport import TransportName
from data_plane.transport_choice import choose_transport, named_transport, obstacles
from data_plane.transport_facts import TransportFacts, transport_facts, ucx_modules
from data_plane.ucxx.settings import UcxxSettings
from tests.support.programs import ran_python
from tests.support.rdma_machine import add_rdma_device

UCXX, NIXL, LIBFABRIC = TransportName.UCXX, TransportName.NIXL, TransportName.LIBFABRIC


def port(device: str = "mlx5_0", *, driver: str = "mlx5_core", **changes: object) -> RdmaPort:
    values = {
        "device": device,
        "port": "1",
        "state": "4: ACTIVE",
        "link_layer": "InfiniBand",
        "rate": "400 Gb/sec (4X NDR)",
        "driver": driver,
        "opens": True,
    }
    return RdmaPort(**(values | changes))  # type: ignore[arg-type]


DOWN = port(state="1: DOWN")
SHUT = port(opens=False)
EFA = port("rdmap0s6", driver="efa", link_layer="Unspecified")
SOFT = port("rxe0", driver="", link_layer="Ethernet")


class TestRead:
    def test_infiniband_with_a_second_port_that_is_down(self, tmp_path: Path) -> None:
        add_rdma_device(tmp_path, states=("4: ACTIVE", "1: DOWN"))
        first, second = rdma_ports(tmp_path)
        assert first == port()
        assert str(first) == "mlx5_0:1 (InfiniBand, 400 Gb/sec (4X NDR))"
        assert (second.name, second.active, second.opens) == ("mlx5_0:2", False, True)

    def test_roce_under_the_name_that_udev_gives(self, tmp_path: Path) -> None:
        add_rdma_device(tmp_path, "rocep24s0", link_layer="Ethernet", rate="100 Gb/sec (4X EDR)")
        (found,) = rdma_ports(tmp_path)
        assert found.driver_is("mlx5")
        assert str(found) == "rocep24s0:1 (Ethernet, 100 Gb/sec (4X EDR))"

    def test_a_container_sees_devices_that_it_may_not_open(self, tmp_path: Path) -> None:
        """/sys shows all of the machine's; a device plugin gives the files of some."""
        add_rdma_device(tmp_path, "mlx5_0", verbs=False)
        add_rdma_device(tmp_path, "mlx5_1", verbs=True)
        assert [each.opens for each in rdma_ports(tmp_path)] == [False, True]

    @pytest.mark.parametrize(
        ("effective", "limit"), [("0000000000000000", 65536), ("0000000000004000", None)]
    )
    def test_ipc_lock_counts_where_it_is_in_force(
        self, effective: str, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A pod that adds the capability gives it to root alone: others have it in CapBnd only."""
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/status").write_text(f"CapEff:\t{effective}\nCapBnd:\t{'f' * 16}\n")
        monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
        assert locked_bytes_limit(tmp_path) == limit

    @pytest.mark.parametrize("verbs", [True, False])
    def test_ucx_is_asked_only_where_there_is_a_network_for_it(
        self, verbs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[int] = []

        def modules() -> frozenset[str]:
            asked.append(1)
            return frozenset({"cuda", "ib"} if verbs else {"cuda"})

        monkeypatch.setattr(facts_module, "ucx_modules", modules)
        monkeypatch.setattr(facts_module, "find_spec", lambda name: name)
        assert not transport_facts(tmp_path, {}).ucxx_has_verbs
        assert not asked
        facts = transport_facts(add_rdma_device(tmp_path), {"UCX_TLS": "rc"})
        assert facts.ucxx_has_verbs == verbs
        assert facts.installed == {UCXX, NIXL, LIBFABRIC}
        assert (facts.ucx_tls, facts.ucx_net_devices) == ("rc", None)


def test_the_ucx_of_ucxx_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one would be able to open nothing else afterwards."""
    monkeypatch.delenv("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", raising=False)
    ask = (
        "from data_plane.transport_facts import ucx_modules; modules = ucx_modules()\n"
        "print(sorted(modules), 'libucs' in open('/proc/self/maps').read())"
    )
    done = ran_python(ask, check=True)
    assert done.stdout.strip() == "['cma', 'cuda'] False", "the wheel of ucxx has no verbs"


def test_what_cannot_be_asked_has_no_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert ucx_modules.__wrapped__() is None


class TestAuto:
    """The decision of one machine."""

    @pytest.mark.parametrize(
        ("facts", "one_host", "name", "rdma"),
        [
            ({}, False, UCXX, False),
            ({"ports": (port(),)}, True, UCXX, False),
            ({"ports": (port(),)}, False, NIXL, True),
            ({"ports": (SHUT, port("mlx5_1"))}, False, NIXL, True),
            ({"ports": (port(),), "ucxx_has_verbs": True}, False, UCXX, True),
            ({"ports": (SOFT,), "ucxx_has_verbs": True}, False, UCXX, True),
            ({"ports": (port(),), "ucx_tls": "tcp,self"}, False, UCXX, False),
            ({"ports": (port(),), "ucx_tls": "^ib"}, False, UCXX, False),
            ({"ports": (port(),), "ucx_tls": "rc_x,tcp"}, False, NIXL, True),
            ({"ports": (port(),), "ucx_tls": "^cma"}, False, NIXL, True),
            ({"ports": (port(),), "ucx_net_devices": "eth0"}, False, UCXX, False),
            ({"ports": (port(),), "ucx_net_devices": "mlx5_0:1,eth0"}, False, NIXL, True),
            ({"ports": (port(),), "locked_bytes": MIN_LOCKED_BYTES}, False, NIXL, True),
            ({"installed": frozenset({NIXL})}, False, NIXL, False),
        ],
    )
    def test_what_is_chosen(
        self, facts: dict[str, Any], one_host: bool, name: TransportName, rdma: bool
    ) -> None:
        choice = choose_transport(TransportFacts(**facts), one_host=one_host)
        assert (choice.name, choice.rdma, choice.obstacles) == (name, rdma, ())

    def test_nothing_installed_says_what_to_install(self) -> None:
        with pytest.raises(ImportError, match=r"distca\[ucxx-cu13\].*distca\[nixl-cu13\]"):
            choose_transport(TransportFacts(installed=frozenset()), one_host=False)


class TestPeers:
    """All processes of a job use the same transport: the pool's servers were there first."""

    @pytest.mark.parametrize("peer", [UCXX, NIXL])
    def test_they_are_followed(self, peer: TransportName) -> None:
        choice = choose_transport(TransportFacts(), one_host=False, peers={peer})
        assert choice.name is peer
        assert choice.obstacles == ()
        if peer is NIXL:
            assert choice.reason == "the servers of the pool use nixl"

    def test_of_several_the_own_choice_is_taken(self) -> None:
        facts = TransportFacts(ports=(port(),))
        assert choose_transport(facts, one_host=False, peers={UCXX, NIXL}).name is NIXL
        assert choose_transport(TransportFacts(), one_host=False, peers={UCXX, NIXL}).name is UCXX

    @pytest.mark.parametrize(("peer", "other"), [(UCXX, NIXL), (NIXL, UCXX)])
    def test_what_only_they_have_says_what_to_install(
        self, peer: TransportName, other: TransportName
    ) -> None:
        facts = TransportFacts(installed=frozenset({other}))
        with pytest.raises(ImportError, match=rf"pool use {peer}.*distca\[{peer}-cu13\]"):
            choose_transport(facts, one_host=False, peers={peer})


class TestByName:
    @pytest.mark.parametrize(
        ("ports", "rdma", "advice"),
        [
            ((EFA,), True, ""),
            ((port(), EFA), True, ""),
            ((port(),), False, "UCX"),
            ((), False, ""),
        ],
    )
    def test_libfabric_is_for_efa(
        self, ports: tuple[RdmaPort, ...], rdma: bool, advice: str
    ) -> None:
        choice = named_transport(LIBFABRIC, TransportFacts(ports=ports), one_host=False)
        assert (choice.name, choice.rdma) == (LIBFABRIC, rdma)
        assert advice in choice.advice
        assert ("rdmap0s6:1" in choice.reason) is rdma

    def test_efa_that_lies_idle_names_the_transport_for_it(self) -> None:
        choice = choose_transport(TransportFacts(ports=(EFA,)), one_host=False)
        assert choice.name is UCXX
        assert "--transport=nixl:libfabric" in choice.advice

    def test_ucxx_with_verbs_uses_them(self) -> None:
        facts = TransportFacts(ports=(port(),), ucxx_has_verbs=True)
        assert named_transport(UCXX, facts, one_host=False).rdma
        assert UcxxSettings(rdma=True).context_options({})["TLS"] == "rc,tcp,self"
        assert UcxxSettings().context_options({})["TLS"] == "tcp,self"


def all_facts() -> Iterator[TransportFacts]:
    """Every combination of what may be there."""
    kinds = (port(), SHUT, DOWN, EFA, SOFT)
    for n_ports in range(3):
        for ports in itertools.combinations(kinds, n_ports):
            for locked, installed, verbs, tls, devices in itertools.product(
                (None, 65536),
                ({UCXX}, {NIXL}, {UCXX, NIXL}),
                (False, True),
                (None, "tcp,self"),
                (None, "eth0"),
            ):
                yield TransportFacts(
                    ports=ports,
                    locked_bytes=locked,
                    installed=frozenset(installed),
                    ucxx_has_verbs=verbs,
                    ucx_tls=tls,
                    ucx_net_devices=devices,
                )


@pytest.mark.parametrize("one_host", [False, True])
@pytest.mark.parametrize("peers", [(), (UCXX,), (NIXL,), (UCXX, NIXL)])
def test_auto_never_ends_on_tcp_in_silence(
    one_host: bool, peers: tuple[TransportName, ...]
) -> None:
    """Over every combination: where devices are there and rows do not use them, somebody asked for
    that, or the choice says why and what to do."""
    for facts in all_facts():
        try:
            choice = choose_transport(facts, one_host=one_host, peers=peers)
        except ImportError:
            assert peers
            assert not set(peers) & facts.installed
            continue
        assert choice.name in facts.installed
        assert choice.reason
        assert choice.rdma <= (not obstacles(facts, choice.name))
        assert not (choice.rdma and choice.obstacles)
        wanted = bool(facts.ports) and not one_host and not facts.left_out_by
        assert wanted == (choice.rdma or bool(choice.idle))
        assert bool(choice.idle) == bool(choice.advice)
        if not facts.ports and not peers and UCXX in facts.installed:
            assert choice.name is UCXX
