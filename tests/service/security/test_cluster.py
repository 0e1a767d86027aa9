"""A small cluster with mTLS trains; strangers reach nothing of it; certificates are replaced while
it trains."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from attention_node.hello import PROTOCOL_VERSION
from core_attention.manifest import RankManifest
from data_plane.transport import Address, HandshakeRejected
from data_plane.ucxx.settings import UcxxSettings
from data_plane.ucxx.transport import UcxxTransport
from distca.contract.identity import Role
from distca.v1 import data_plane_pb2
from tests.service.security.pki import HOUR, Pki
from tests.service.security.secure_cluster import CHECK_SECONDS, SecureCluster
from tests.support import preloaded
from tests.support.cluster import NODE_SHAPE, Cluster
from tests.support.team import Team

pytestmark = pytest.mark.timeout(300)

LENGTHS = ([[40, 24], [64]], [[64], [30, 34]])
"""Documents of two ranks in two nano-batches."""

ROTATION_SECONDS = 60.0
"""New certificates must be in use after this."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, pki: Pki) -> Iterator[SecureCluster]:
    running = SecureCluster(tmp_path_factory.mktemp("cluster"), pki)
    yield running
    running.close()


def team(cluster: SecureCluster, placement: str = "mixed", n_ranks: int = 2) -> Team:
    """Ranks that show the trainer's certificate."""
    return Team(
        cast("Cluster", cluster),  # a team needs its address and folder
        n_ranks,
        NODE_SHAPE,
        placement=placement,
        planner="",
        certificate_check_seconds=CHECK_SECONDS,
        **cluster.files(Role.TRAINER).for_client(),
    )


FROM_THE_ENVIRONMENT = """
import json, distca, torch
from tests.support.tiny_models import TINY_LLAMA
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model("llama", **TINY_LLAMA)
model = AutoModelForCausalLM.from_config(config, attn_implementation="distca")
ids = torch.arange(60)[None]
model(input_ids=ids, position_ids=ids % 30, labels=ids).loss.backward()
(attached,) = distca.Attached._all
options = attached.session.options
kept = ("job", "tick_timeout_seconds", "one_host", "placement", "data_host")
print(json.dumps({name: getattr(options, name) for name in kept}))
"""
"""A loop that names nothing of where it runs."""


def test_a_loop_in_a_process_of_its_own_finds_all_in_the_environment(
    cluster: SecureCluster,
) -> None:
    files = cluster.files(Role.TRAINER)
    environment = {
        "DISTCA_CONTROL_PLANE": cluster.address,
        "DISTCA_TLS_CA": files.ca_file,
        "DISTCA_TLS_CERTIFICATE": files.certificate_file,
        "DISTCA_TLS_KEY": files.key_file,
        "DISTCA_JOB": "from-the-environment",
        "DISTCA_PLACEMENT": "pool",
        "DISTCA_DATA_HOST": "127.0.0.1",
        "DISTCA_ONE_HOST": "1",
        "DISTCA_TICK_TIMEOUT_SECONDS": "50",
        "DISTCA_PROFILE_DIR": cluster.folder,
        "CUDA_VISIBLE_DEVICES": "",
    }
    run = loop_with(environment)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout) == {
        "job": "from-the-environment",
        "tick_timeout_seconds": 50.0,
        "one_host": True,
        "placement": "pool",
        "data_host": "127.0.0.1",
    }
    del environment["DISTCA_TLS_KEY"]
    run = loop_with(environment)
    assert run.returncode
    assert "key_file is None" in run.stderr


def loop_with(environment: dict[str, object]) -> subprocess.CompletedProcess[str]:
    texts = {name: str(value) for name, value in environment.items()}
    return preloaded.run(FROM_THE_ENVIRONMENT, environment=os.environ | texts, timeout=100)


def manifests(n_ranks: int = 2) -> list[RankManifest]:
    return [RankManifest.from_lengths(0, rank, LENGTHS[rank]) for rank in range(n_ranks)]


def sessions_refused(cluster: SecureCluster) -> dict[str, float]:
    """Refused connections of ranks, by reason."""
    url = f"http://{cluster.node.addresses['metrics']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        sample.labels["reason"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "distca_attention_node_sessions_refused_total"
    }


def test_a_step_is_right_and_no_log_holds_a_token(cluster: SecureCluster) -> None:
    with team(cluster) as ranks:
        ranks.check(manifests())
        tokens = [session._link.token for session in ranks.sessions]
    logs = cluster.log("control-plane") + cluster.log("node-0")
    assert "spiffe://distca/trainer/cluster connected" in logs
    for token in tokens:
        assert token.hex() not in logs
        assert repr(token)[2:-1] not in logs


def test_only_a_jobs_own_ranks_reach_its_ticks(cluster: SecureCluster) -> None:
    """Over UCX, which knows no certificates: the token alone decides."""
    host, _, port = cluster.node.addresses["data"].rpartition(":")
    address = Address(host, int(port))
    transport = UcxxTransport(UcxxSettings(one_host=True))
    before = sessions_refused(cluster)
    try:
        with team(cluster, "pool", 1) as closed:
            closed.run(manifests(1))
            old_job, old_token = closed.sessions[0].job_id, closed.sessions[0]._link.token
        with team(cluster, "pool") as ours, team(cluster, "pool", 1) as others:
            job_id, token = ours.sessions[0].job_id, ours.sessions[0]._link.token
            ours.run(manifests())

            def connect(secret: bytes = token, **changes: Any) -> None:
                fields: dict[str, Any] = {
                    "version": PROTOCOL_VERSION,
                    "job_id": job_id,
                    "rank": 0,
                    "server_id": "node-0",
                    **changes,
                }
                hello = data_plane_pb2.Hello(**fields).SerializeToString()
                transport.connect(address, hello, 5.0, secret=secret)

            unknown = data_plane_pb2.HELLO_REFUSAL_UNKNOWN
            wrong: list[tuple[dict[str, Any], int]] = [
                ({"secret": b""}, unknown),
                ({"secret": bytes(36)}, unknown),
                ({"secret": others.sessions[0]._link.token}, unknown),
                ({"rank": 1}, unknown),
                ({"secret": old_token}, unknown),
                ({"job_id": old_job, "secret": old_token}, unknown),
                ({"job_id": others.sessions[0].job_id}, unknown),
                ({"server_id": "node-9"}, data_plane_pb2.HELLO_REFUSAL_SERVER),
                ({"server_id": "node-9", "secret": b""}, data_plane_pb2.HELLO_REFUSAL_SERVER),
                ({"version": 99}, data_plane_pb2.HELLO_REFUSAL_VERSION),
            ]
            for changes, code in wrong:
                with pytest.raises(HandshakeRejected) as refused:
                    connect(**changes)
                assert refused.value.code == code
                assert not (code == unknown and refused.value.proven)
            with pytest.raises(HandshakeRejected):
                transport.connect(address, b"\xff\xfe garbage", 5.0, secret=token)
            # The refused have disturbed nobody.
            ours.check(manifests())
    finally:
        transport.close()
    after = sessions_refused(cluster)
    assert after["token"] - before["token"] == 6
    assert after["unknown-job"] - before["unknown-job"] >= 1


def connected_with(cluster: SecureCluster, role: Role, end: datetime) -> int:
    """How many connections the control plane has seen with the certificate that ends then."""
    wanted = f"certificate good until {end.isoformat()}"
    return sum(
        f"spiffe://distca/{role}/cluster connected" in line and line.endswith(wanted)
        for line in cluster.log("control-plane").splitlines()
    )


def test_no_step_is_lost_while_every_certificate_and_the_authority_are_replaced(
    cluster: SecureCluster, pki: Pki, foreign_pki: Pki
) -> None:
    """As an operator does it: first everybody trusts both authorities, then certificates of the new
    one, then nobody trusts the old."""
    old, new = pki.ca_file.read_bytes(), foreign_pki.ca_file.read_bytes()
    seeds = itertools.count()
    with team(cluster) as ranks:
        ranks.check(manifests())
        for number, (trusted, issuer) in enumerate(
            ((old + new, pki), (old + new, foreign_pki), (new, foreign_pki))
        ):
            lifetime = HOUR + timedelta(minutes=7 + number)
            ends = {
                role: mount.put(trusted, issuer.issue(role, "cluster", lifetime=lifetime))
                for role, mount in cluster.mounts.items()
            }
            began = time.monotonic()
            # Two ranks and a node, each with a connection of its own.
            while (
                connected_with(cluster, Role.TRAINER, ends[Role.TRAINER]) < 2
                or connected_with(cluster, Role.SERVER, ends[Role.SERVER]) < 1
            ):
                assert time.monotonic() - began < ROTATION_SECONDS
                ranks.check(manifests(), seed=next(seeds))
            for _ in range(5):
                ranks.check(manifests(), seed=next(seeds))
    logs = cluster.log("node-0") + cluster.log("control-plane")
    assert "Traceback" not in logs
    assert "lost the control plane" not in logs
    assert "registered again" not in logs, "the lease of before goes on"


def test_processes_end_well(cluster: SecureCluster) -> None:
    assert cluster.node.terminate() == 0
    assert cluster.processes[0].terminate() == 0
