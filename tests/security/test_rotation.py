"""Certificates that are replaced on disk come into use while calls and streams go on."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from control_plane.server import ControlPlane
from distca.contract import rpc
from distca.contract.identity import Role
from distca.v1 import jobs_pb2, membership_pb2
from tests.control_plane.service_harness import (
    Client,
    Watcher,
    eventually,
    job_spec,
    rank_manifest,
)
from tests.security.pki import (
    HOUR,
    Files,
    Mounted,
    Pki,
    control_plane_with,
    ends,
    secure_client,
)

CHECK_SECONDS = 0.1


def await_plan(watcher: Watcher, step: int) -> None:
    """Reads until the plan of ``step``: a stream that moved tells again what is not finished."""
    while True:
        event = watcher.next()
        if isinstance(event, jobs_pb2.StepPlanned) and event.plan.manifest.step == step:
            return


class Training:
    """A rank that runs step after step in a thread of its own: manifest, plan, report."""

    def __init__(self, trainer: Client, server: Client) -> None:
        self._trainer = trainer
        self._at_server = server.watch_server(server.register("s0"))
        self._job_id, self._lease = trainer.open(0, job_spec("rotated", n_ranks=1))
        self._at_rank = trainer.watch_rank(self._job_id, self._lease)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.steps = 0
        self.error: BaseException | None = None
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        if self.error is not None:
            raise self.error
        self._trainer.close_job(self._job_id, self._lease)

    def run_more(self, count: int = 10) -> None:
        """Waits until ``count`` more steps have run."""
        target = self.steps + count
        eventually(lambda: self.steps >= target or self.error is not None)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.01):
                self._trainer.submit(self._job_id, self._lease, rank_manifest(self.steps, 0))
                for watcher in (self._at_rank, self._at_server):
                    await_plan(watcher, self.steps)
                self._trainer.report_rank(self._job_id, self._lease, self.steps, 0)
                self.steps += 1
        except BaseException as error:
            self.error = error


@pytest.fixture
def mounts(tmp_path: Path, pki: Pki) -> dict[Role, Mounted]:
    return {
        role: Mounted(tmp_path / role, pki.issue(role, "rotated"))
        for role in (Role.CONTROL_PLANE, Role.SERVER, Role.TRAINER)
    }


@pytest.fixture
def control_plane(mounts: dict[Role, Mounted]) -> Iterator[ControlPlane]:
    with control_plane_with(
        mounts[Role.CONTROL_PLANE].files.for_server(), coordinator={"lease_seconds": 60.0}
    ) as control_plane:
        yield control_plane


def connected_with(caplog: pytest.LogCaptureFixture, role: Role, end: datetime) -> bool:
    """Whether the control plane has seen this certificate."""
    return any(
        message.startswith(f"spiffe://distca/{role}/rotated connected")
        and message.endswith(f"certificate good until {end.isoformat()}")
        for message in caplog.messages
    )


def test_no_step_is_lost_while_every_certificate_and_the_authority_are_replaced(
    control_plane: ControlPlane,
    mounts: dict[Role, Mounted],
    pki: Pki,
    foreign_pki: Pki,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As an operator does it: first everybody trusts both authorities, then certificates of the new
    one, then nobody trusts the old."""
    caplog.set_level(logging.INFO)
    old, new = pki.ca_file.read_bytes(), foreign_pki.ca_file.read_bytes()
    with (
        secure_client(
            control_plane, mounts[Role.SERVER].files, certificate_check_seconds=CHECK_SECONDS
        ) as server,
        secure_client(
            control_plane, mounts[Role.TRAINER].files, certificate_check_seconds=CHECK_SECONDS
        ) as trainer,
    ):
        training = Training(trainer, server)
        try:
            training.run_more()
            for number, (trusted, issuer) in enumerate(
                ((old + new, pki), (old + new, foreign_pki), (new, foreign_pki))
            ):
                for role, mount in mounts.items():
                    lifetime = HOUR + timedelta(minutes=1 + number)
                    end = mount.put(trusted, issuer.issue(role, "rotated", lifetime=lifetime))
                    if role is not Role.CONTROL_PLANE:
                        eventually(functools.partial(connected_with, caplog, role, end))
                    training.run_more()
        finally:
            training.close()
    assert training.steps >= 10 * 10
    assert "moved" in caplog.text


def test_certificates_that_are_not_accepted_change_nothing(
    control_plane: ControlPlane,
    mounts: dict[Role, Mounted],
    pki: Pki,
    foreign_pki: Pki,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    mount = mounts[Role.SERVER]
    with secure_client(
        control_plane,
        mount.files,
        certificate_check_seconds=CHECK_SECONDS,
        connect_seconds=0.5,
    ) as server:
        lease = server.register("s0")
        watcher = server.watch_server(lease)
        mount.put(pki.ca_file.read_bytes(), foreign_pki.issue(Role.SERVER, "rotated"))
        eventually(lambda: "no connection with the new certificates" in caplog.text)
        server.heartbeat(lease)
        assert watcher.is_quiet()
        # Corrected, they come into use.
        end = mount.put(
            pki.ca_file.read_bytes(), pki.issue(Role.SERVER, "rotated", lifetime=2 * HOUR)
        )
        eventually(lambda: connected_with(caplog, Role.SERVER, end))
        server.heartbeat(lease)
        assert watcher.is_quiet()
        watcher.cancel()
    assert caplog.text.count("no connection with the new certificates") == 1


def test_half_written_files_are_left_alone(
    control_plane: ControlPlane,
    tmp_path: Path,
    pki: Pki,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not everybody swaps folders: a certificate may be there before its key."""
    caplog.set_level(logging.INFO)
    files = pki.issue(Role.OPERATOR, "rotated", file="written")
    with secure_client(control_plane, files, certificate_check_seconds=CHECK_SECONDS) as client:
        request = membership_pb2.ListServersRequest()
        client.membership.ListServers(request)
        following = pki.issue(Role.OPERATOR, "rotated", file="following", lifetime=2 * HOUR)
        files.certificate_file.write_bytes(following.certificate_file.read_bytes())
        eventually(lambda: "is another certificate's" in caplog.text)
        client.membership.ListServers(request)
        files.key_file.write_bytes(following.key_file.read_bytes())
        eventually(lambda: connected_with_soon(client, caplog, ends(files.certificate_file)))


def connected_with_soon(client: Client, caplog: pytest.LogCaptureFixture, end: datetime) -> bool:
    """Calls, so that there is something to see."""
    client.membership.ListServers(membership_pb2.ListServersRequest())
    return connected_with(caplog, Role.OPERATOR, end)


def test_a_closed_channel_leaves_no_thread(control_plane: ControlPlane, pki: Pki) -> None:
    before = set(threading.enumerate())
    with secure_client(control_plane, pki.issue(Role.OPERATOR)):
        names = {thread.name for thread in set(threading.enumerate()) - before}
        assert "distca-certificates" in names
    eventually(
        lambda: (
            not any(
                thread.name == "distca-certificates"
                for thread in set(threading.enumerate()) - before
            )
        )
    )


def test_the_control_plane_starts_with_no_half_pair(pki: Pki, tmp_path: Path) -> None:
    files, other = pki.issue(Role.CONTROL_PLANE), pki.issue(Role.OPERATOR)
    wrong = Files(files.ca_file, files.certificate_file, other.key_file)
    with (
        pytest.raises(ValueError, match="is another certificate's"),
        control_plane_with(wrong.for_server()),
    ):
        pass
    with pytest.raises(ValueError, match="holds no certificate in PEM"):
        rpc.open_channel(rpc.RpcSettings(address="localhost:1", ca_file=files.key_file))
