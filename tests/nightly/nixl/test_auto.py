"""One job, one transport: ``auto`` follows the pool; whoever does not fit is told so at once."""

from __future__ import annotations

import json
import time
from ctypes.util import find_library
from pathlib import Path

import pytest

from distca.apps.doctor.cluster_probe import ClusterProbe
from distca.apps.doctor.finding import Severity
from distca.apps.doctor.settings import DoctorSettings
from distca.apps.doctor.surroundings import Surroundings
from distca.apps.doctor.transport_checks import check_transport
from distca.contract import rpc
from tests.service.trainer_client.test_parity import make_shape, spanning
from tests.support.cluster import cluster
from tests.support.errors import fails
from tests.support.programs import ran_python
from tests.support.rdma_libraries import MISSING_LIBRARIES, RDMA_MODULES
from tests.support.team import Team


def test_ranks_follow_the_pool(tmp_path: Path) -> None:
    """On a machine without RDMA they would take ucxx."""
    with cluster(tmp_path, 0) as pool:
        pool.start_nodes(["node-0"], transport="nixl")
        with Team(pool, 2, make_shape(), placement="pool") as team:
            assert {session._transport.name for session in team.sessions} == {"nixl"}
            team.check(spanning(2, 301))


def test_a_rank_that_does_not_fit_the_pool_is_refused(tmp_path: Path) -> None:
    with cluster(tmp_path, 0) as pool:
        pool.start_nodes(["node-0"], transport="ucxx")
        began = time.monotonic()
        with fails(rpc.Reason.SPEC_MISMATCH):
            Team(pool, 1, make_shape(), placement="pool", transport="nixl")
        assert time.monotonic() - began < 20.0
        # The doctor says it before anybody trains.
        around = Surroundings(
            settings=DoctorSettings(transport="nixl"),
            cluster=ClusterProbe(rpc.RpcSettings(address=pool.address), 10.0),
        )
        assert around.pool_transports == {"ucxx"}
        (finding,) = check_transport(around)
        assert finding.status is Severity.FAIL
        assert "the servers of the pool use ucxx" in finding.says


@pytest.mark.skipif(
    find_library("efa") is None, reason="needs rdma-core (Debian: apt install ibverbs-providers)"
)
def test_the_transports_of_a_machine_with_rdma_core_end_well() -> None:
    """With rdma-core's libefa.so.1 nixl's UCX would load its module for EFA, and with that a second
    libnl: such a process ends in a segmentation fault."""
    program = (
        "from data_plane.transports import open_transport\n"
        "open_transport('nixl', device='cpu', one_host=False).close()\n"
        "maps = open('/proc/self/maps').read()\n"
        "print('libuct_ib_mlx5' in maps, 'libuct_ib_efa' in maps)"
    )
    done = ran_python(program, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_what_carries_infiniband_and_roce_resolves() -> None:
    """All of it comes with the wheel; the module for EFA wants rdma-core."""
    done = ran_python(MISSING_LIBRARIES, check=True)
    missing = json.loads(done.stdout)
    assert {name: missing[name] for name in RDMA_MODULES} == {name: [] for name in RDMA_MODULES}
    assert missing["libuct_ib_efa"] in (["libefa.so.1"], [])
