"""A job goes on through a restart of its control plane, whoever asks for its name meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

from distca.contract import rpc
from distca.contract.identity import Role
from tests.service.security.pki import Pki
from tests.service.security.secure_cluster import SecureCluster
from tests.service.security.test_cluster import manifests, team
from tests.support.service_harness import client_of, job_spec


@pytest.mark.timeout(180)
def test_a_job_trains_on_through_a_restart_while_a_thief_asks_for_its_name(
    pki: Pki, tmp_path: Path
) -> None:
    cluster = SecureCluster(tmp_path, pki)
    try:
        with team(cluster, placement="pool") as trains:
            trains.check(manifests())
            (name,) = {session.job_id.rpartition("-")[0] for session in trains.sessions}
            files = pki.issue(Role.TRAINER, "thief")
            outcomes: Counter[str] = Counter()
            over = threading.Event()

            def steal() -> None:
                with client_of(cluster.address, call_seconds=2.0, **files.for_client()) as thief:
                    while not over.wait(0.01):
                        try:
                            thief.open(0, job_spec(name, n_ranks=1))
                            outcomes["stolen"] += 1
                        except rpc.RpcError as error:
                            outcomes[error.reason.kind] += 1

            stealing = threading.Thread(target=steal)
            stealing.start()
            try:
                cluster.restart_control_plane()
                for seed in range(1, 4):
                    trains.check(manifests(), seed=seed)
            finally:
                over.set()
                stealing.join(20.0)
            assert not stealing.is_alive()
            assert outcomes["other-owner"]
    finally:
        cluster.close()
