"""Who leads of several control planes, and who takes over."""

from __future__ import annotations

import asyncio
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane.leadership.kubernetes_api import (
    KubernetesApi,
    KubernetesError,
    Object,
    cluster_api,
)
from control_plane.leadership.kubernetes_lease import KubernetesLease
from control_plane.leadership.leader_label import LEADER_LABEL, LeaderLabel
from control_plane.leadership.leadership import BEAT_SECONDS, FileLock, Leadership
from control_plane.server import ControlPlane
from distca.apps.certs.authority import Authority
from distca.contract import rpc
from distca.contract.identity import Identity, Role
from tests.service.control_plane.lease_api import LeaseApi, lease_api
from tests.support.errors import fails
from tests.support.service_harness import (
    client_of,
    job_spec,
    rank_manifest,
    running,
)
from tests.support.waiting import eventually

DEADLINE_SECONDS = 10.0


def within(seconds: float, make: Callable[[], Awaitable[Any]]) -> Any:
    """Runs a coroutine to its end, with a deadline."""

    async def bounded() -> Any:
        return await asyncio.wait_for(make(), seconds)

    return asyncio.run(bounded())


async def is_waiting(task: asyncio.Task[Any], seconds: float) -> bool:
    await asyncio.wait({task}, timeout=seconds)
    return not task.done()


@pytest.fixture
def api() -> Iterator[LeaseApi]:
    with lease_api() as api:
        yield api


def candidate(api: LeaseApi, identity: str) -> KubernetesLease:
    """One that gives up and takes over within seconds, in a pod of its name."""
    return KubernetesLease(
        api.client(),
        "distca",
        "leader",
        identity,
        label=LeaderLabel(api.client(), "distca", identity),
        lease_seconds=2,
        renew_seconds=1.0,
        retry_seconds=0.1,
    )


def hand_over(first: Leadership, second: Leadership) -> None:
    """The second waits while the first leads, and takes over when it is released."""

    async def lead() -> None:
        await first.acquire()
        taking_over = asyncio.create_task(second.acquire())
        assert await is_waiting(taking_over, 0.5)
        assert first.is_held
        assert not second.is_held
        await first.release()
        assert not first.is_held
        # Well before a lease would have run out.
        await asyncio.wait_for(taking_over, 5.0)
        assert second.is_held
        await second.release()

    within(DEADLINE_SECONDS, lead)


def test_lock_of_a_file_is_handed_over(tmp_path: Path) -> None:
    path = tmp_path / "leader.lock"
    hand_over(FileLock(path, poll_seconds=0.02), FileLock(path, poll_seconds=0.02))


def test_lock_of_a_leader_that_is_stopped_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "leader.lock"
    code = f"""
import asyncio
from pathlib import Path
from control_plane.leadership.leadership import FileLock

async def lead():
    lock = FileLock(Path({str(path)!r}))
    await lock.acquire()
    print("leads", flush=True)
    print(await lock.lost(), lock.is_held, flush=True)

asyncio.run(lead())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as leader:
        said = leader.stdout
        assert said is not None
        assert said.readline() == b"leads\n"

        async def stand_by() -> None:
            lock = FileLock(path, poll_seconds=0.02, lease_seconds=2.0)
            taking_over = asyncio.create_task(lock.acquire())
            assert await is_waiting(taking_over, 3.0), "the leader shows that it is at work"
            leader.send_signal(signal.SIGSTOP)
            # Of a busy machine's pauses the standby counts but a tenth of a second each.
            await taking_over
            assert lock.is_held
            leader.send_signal(signal.SIGCONT)
            told = await asyncio.to_thread(said.readline)
            assert told.endswith(b"showed nothing for too long False\n")
            assert lock.is_held
            await lock.release()

        try:
            within(6 * DEADLINE_SECONDS, stand_by)
        finally:
            leader.kill()


def test_standbys_do_not_replace_each_other(tmp_path: Path) -> None:
    async def lead() -> None:
        path = tmp_path / "leader.lock"
        gone = FileLock(path)
        await gone.acquire()
        # Far from the time between two beats, which a busy machine draws out.
        standbys = [
            FileLock(path, poll_seconds=0.02, lease_seconds=3 * BEAT_SECONDS) for _ in range(3)
        ]
        losing = [asyncio.create_task(stand_by(standby)) for standby in standbys]
        await eventually_led(standbys)
        # Standbys that do replace the new leader do so with their next poll.
        for _ in range(20):
            assert [standby.is_held for standby in standbys].count(True) == 1
            await asyncio.sleep(0.1)
        for task in losing:
            task.cancel()

    async def stand_by(standby: FileLock) -> str:
        await standby.acquire()
        return await standby.lost()

    async def eventually_led(standbys: list[FileLock]) -> None:
        while not any(standby.is_held for standby in standbys):
            await asyncio.sleep(0.01)

    within(2 * DEADLINE_SECONDS, lead)


def test_lease_that_the_chart_has_made_is_taken_and_stays_the_charts(api: LeaseApi) -> None:
    """It has labels and no holder."""
    labels = {"app.kubernetes.io/managed-by": "Helm"}
    api.leases["leader"] = {
        "metadata": {"name": "leader", "labels": labels, "resourceVersion": "1"},
        "spec": {},
    }
    hand_over(candidate(api, "one"), candidate(api, "two"))
    assert api.leases["leader"]["metadata"]["labels"] == labels
    spec = api.leases["leader"]["spec"]
    assert spec["leaseTransitions"] >= 2
    assert spec["leaseDurationSeconds"] == 2
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", spec["renewTime"])


def test_leader_keeps_a_lease_that_it_renews(api: LeaseApi) -> None:
    async def lead() -> None:
        one, two = candidate(api, "one"), candidate(api, "two")
        await one.acquire()
        losing = asyncio.create_task(one.lost())
        taking_over = asyncio.create_task(two.acquire())
        # Longer than the lease would run without renewal.
        assert await is_waiting(losing, 3.0)
        assert one.is_held
        assert not taking_over.done()
        for task in (losing, taking_over):
            task.cancel()

    within(DEADLINE_SECONDS, lead)


@pytest.mark.parametrize("how", ["broken", "silent"])
def test_leader_that_cannot_renew_stops_before_another_may_lead(api: LeaseApi, how: str) -> None:
    async def lead() -> None:
        one, two = candidate(api, "one"), candidate(api, "two")
        await one.acquire()
        losing = asyncio.create_task(one.lost())
        taking_over = asyncio.create_task(two.acquire())
        await asyncio.sleep(0.3)
        getattr(api, how).set()
        assert "was not renewed for 1 s" in await asyncio.wait_for(losing, 8.0)
        assert not one.is_held
        assert api.holder("leader") == "one"
        getattr(api, how).clear()
        await asyncio.wait_for(taking_over, 5.0)
        assert two.is_held
        assert not one.is_held
        assert api.holder("leader") == "two"

    within(2 * DEADLINE_SECONDS, lead)


def test_leader_that_was_stopped_leads_no_more_before_it_looks_at_the_lease(
    api: LeaseApi,
) -> None:
    async def lead() -> None:
        one = candidate(api, "one")
        await one.acquire()
        # The event loop does not run, as when the process is stopped.
        time.sleep(1.1)
        assert not one.is_held

    within(DEADLINE_SECONDS, lead)


def test_leader_notices_that_another_has_taken_the_lease(api: LeaseApi) -> None:
    async def lead() -> None:
        one = candidate(api, "one")
        await one.acquire()
        api.leases["leader"]["spec"]["holderIdentity"] = "another"
        api.leases["leader"]["metadata"]["resourceVersion"] = "99999"
        assert await asyncio.wait_for(one.lost(), 8.0) == "Lease distca/leader was taken by another"
        assert not one.is_held

    within(DEADLINE_SECONDS, lead)


def test_of_two_who_write_at_once_one_wins(api: LeaseApi) -> None:
    one, two = candidate(api, "one"), candidate(api, "two")
    first = one._take()
    assert first
    api.leases["leader"]["spec"]["holderIdentity"] = ""
    lease = two._read()
    assert lease is not None
    assert one._take()
    assert not two._write(lease)
    assert api.holder("leader") == "one"


def leaders(api: LeaseApi) -> set[str]:
    """The pods that a Service of the leader selects."""
    return {pod for pod, labels in api.labels.items() if labels.get(LEADER_LABEL) == "true"}


def test_label_of_the_pod_that_leads_is_handed_over(api: LeaseApi) -> None:
    # A process that led in this pod and was killed has left its label.
    api.labels["two"] = {LEADER_LABEL: "true", "app": "distca"}

    async def lead() -> None:
        one, two = candidate(api, "one"), candidate(api, "two")
        await one.acquire()
        taking_over = asyncio.create_task(two.acquire())
        await eventually_true(lambda: leaders(api) == {"one"})
        await one.release()
        await asyncio.wait_for(taking_over, 8.0)
        assert leaders(api) == {"two"}
        assert api.labels["two"]["app"] == "distca"
        await two.release()
        assert not leaders(api)

    within(DEADLINE_SECONDS, lead)


def test_label_that_could_not_be_set_is_set_at_a_renewal_and_then_left_alone(
    api: LeaseApi,
) -> None:
    class Refusing(KubernetesApi):
        def patch(self, path: str, body: Object) -> Object:
            if refuse:
                raise ConnectionError("no route to the API server")
            return super().patch(path, body)

    refuse = True
    label = LeaderLabel(Refusing(api.url), "distca", "one")
    one = KubernetesLease(
        api.client(),
        "distca",
        "leader",
        "one",
        label=label,
        lease_seconds=2,
        renew_seconds=1.0,
        retry_seconds=0.05,
    )

    async def lead() -> None:
        nonlocal refuse
        await one.acquire()
        assert one.is_held
        renewing = asyncio.create_task(one.lost())
        assert await is_waiting(renewing, 0.2)
        assert not leaders(api)
        refuse = False
        await eventually_true(lambda: leaders(api) == {"one"})
        assert await is_waiting(renewing, 0.5)
        assert api.patches == 1
        renewing.cancel()

    within(DEADLINE_SECONDS, lead)


async def eventually_true(condition: Callable[[], bool]) -> None:
    """Waits for it; the test's own deadline bounds this."""
    while not condition():
        await asyncio.sleep(0.02)


def test_times_that_would_let_two_lead_are_refused(api: LeaseApi) -> None:
    with pytest.raises(ValueError):
        KubernetesLease(api.client(), "distca", "leader", "one", lease_seconds=2, renew_seconds=3)


@pytest.fixture
def api_over_tls(
    api: LeaseApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[LeaseApi, Path]:
    """The API as a pod sees it, and the folder of its account."""
    account = tmp_path / "account"
    account.mkdir()
    authority = Authority.make(timedelta(days=1))
    identity = Identity(role=Role.CONTROL_PLANE, name="kubernetes")
    signed = authority.issue(identity, lifetime=timedelta(days=1), names=["127.0.0.1"])
    (tmp_path / "server.pem").write_bytes(signed.certificate + signed.key)
    (account / "ca.crt").write_bytes(authority.pem.certificate)
    (account / "token").write_text("first\n")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    api.server.socket = context.wrap_socket(api.server.socket, server_side=True)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.server.server_port))
    # One of the environment's, which nobody serves.
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    return api, account


def test_pod_calls_with_its_accounts_token_as_it_is_now(
    api_over_tls: tuple[LeaseApi, Path],
) -> None:
    api, account = api_over_tls
    client = cluster_api(account)
    client.patch("/api/v1/namespaces/distca/pods/one", {"metadata": {"labels": {"a": "b"}}})
    (account / "token").write_text("renewed\n")
    client.patch("/api/v1/namespaces/distca/pods/one", {"metadata": {"labels": {"a": None}}})
    assert api.authorizations == ["Bearer first", "Bearer renewed"]
    assert api.labels["one"] == {}


def test_api_server_of_another_authority_gets_no_token(
    api_over_tls: tuple[LeaseApi, Path],
) -> None:
    api, account = api_over_tls
    (account / "ca.crt").write_bytes(Authority.make(timedelta(days=1)).pem.certificate)
    with pytest.raises(urllib.error.URLError) as refused:
        cluster_api(account).get("/api/v1/namespaces/distca/pods/one")
    assert isinstance(refused.value.reason, ssl.SSLCertVerificationError)
    assert api.authorizations == []


def test_refusal_says_what_the_api_server_says(api: LeaseApi) -> None:
    api.broken.set()
    with pytest.raises(KubernetesError) as refused:
        api.client().get("/apis/coordination.k8s.io/v1/namespaces/distca/leases/leader")
    assert refused.value.status == 500


def health_of(control_plane: ControlPlane) -> int:
    with grpc.insecure_channel(control_plane.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status)


def test_standby_refuses_every_call_and_takes_over(tmp_path: Path) -> None:
    shared: dict[str, Any] = {
        "leader_lock": tmp_path / "leader.lock",
        "state_dir": tmp_path / "state",
    }
    serving = health_pb2.HealthCheckResponse
    with ExitStack() as leading:
        leader = leading.enter_context(running(**shared))
        with (
            running(**shared, stands_by=True) as standby,
            client_of(standby.address) as client,
        ):
            assert health_of(leader) == serving.SERVING
            assert health_of(standby) == serving.NOT_SERVING
            with fails(rpc.Reason.STANDBY):
                client.register("s0")
            with fails(rpc.Reason.STANDBY):
                client.open(0)
            with client_of(leader.address) as members:
                members.register("s0")
                former = epoch_of_a_plan(members)
            leading.close()
            eventually(lambda: health_of(standby) == serving.SERVING)
            client.register("s0")
            assert epoch_of_a_plan(client) > former


def epoch_of_a_plan(client: Any) -> int:
    job_id, lease = client.open(0, job_spec(n_ranks=1))
    watcher = client.watch_rank(job_id, lease)
    watcher.next("job_opened")
    client.submit(job_id, lease, rank_manifest(0, 0))
    epoch = int(watcher.next("step_planned").plan.epoch)
    watcher.cancel()
    return epoch
