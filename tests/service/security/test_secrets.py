"""Tokens, keys, leases and private keys are in no log, no error and no text of an object."""

from __future__ import annotations

import base64
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from attention_node.served_job import JobDescription
from control_plane.access.job_keys import JobKeys
from core_attention.whole_file import write_whole
from distca.contract import rpc
from distca.contract.identity import Role
from distca.contract.tls import Certificates
from distca.contract.tokens import KEY_BYTES, rank_token
from distca.v1 import jobs_pb2, membership_pb2
from tests.service.security.pki import Pki, control_plane_with, secure_client
from tests.support.service_harness import SHAPE, job_spec, rank_manifest

SECRET = b"nobody may ever read these bytes in a log of any kind"


def spellings(secret: bytes) -> set[str]:
    """How a secret might be written."""
    return {
        secret.hex(),
        base64.b64encode(secret).decode().rstrip("="),
        repr(secret)[2:-1],
        secret.decode(errors="replace"),
    }


def test_nothing_that_happens_to_a_job_logs_a_secret(
    pki: Pki, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "secret"
    write_whole(path, SECRET, mode=0o600)
    errors = []
    secrets = {SECRET}
    with (
        control_plane_with(
            pki.issue(Role.CONTROL_PLANE).for_server(),
            token_secret_file=path,
            state_dir=path.parent,
        ) as control_plane,
        secure_client(control_plane, pki.issue(Role.TRAINER)) as trainer,
        secure_client(control_plane, pki.issue(Role.SERVER)) as server,
    ):
        server_lease = server.register("s0")
        at_server = server.watch_server(server_lease)
        job_id, lease = trainer.open(0, job_spec(n_ranks=1))
        at_rank = trainer.watch_rank(job_id, lease)
        secrets |= {trainer.tokens.of[lease], at_server.next("job_opened").verification_key}
        secrets |= {lease.encode(), server_lease.encode()}
        at_rank.next("job_opened")
        trainer.submit(job_id, lease, rank_manifest(0, 0))
        at_rank.next("step_planned")
        for wrong in (
            lambda: trainer.jobs.RenewRank(
                jobs_pb2.RenewRankRequest(job_id=job_id, rank_lease_id=server_lease)
            ),
            lambda: server.heartbeat(lease),
            lambda: server.membership.DrainServer(
                membership_pb2.DrainServerRequest(server_id="other", lease_id=server_lease)
            ),
            lambda: trainer.open(0, job_spec(n_ranks=1)),
        ):
            with pytest.raises(rpc.RpcError) as caught:
                wrong()
            errors.append(str(caught.value))
        trainer.close_job(job_id, lease)
        server.membership.DeregisterServer(
            membership_pb2.DeregisterServerRequest(lease_id=server_lease)
        )
    text = caplog.text + "\n".join(errors)
    assert job_id in text, "the log tells of the job"
    for secret in secrets:
        assert not [word for word in spellings(secret) if word in text]


def test_the_key_of_a_certificate_shows_in_no_text(pki: Pki) -> None:
    files = pki.issue(Role.TRAINER)
    read = Certificates.read(
        authority=files.ca_file, certificate=files.certificate_file, key=files.key_file
    )
    assert read.key is not None
    assert b"PRIVATE KEY" in read.key
    for shown in (repr(read), str(read), repr(replace(read, chain=None))):
        assert "PRIVATE KEY" not in shown


def test_keys_and_tokens_show_in_no_text() -> None:
    key = bytes(range(KEY_BYTES))
    described = JobDescription(
        job_id="j",
        name="j",
        verification_key=key,
        n_ranks=1,
        n_layers=1,
        n_nano_batches=1,
        shape=SHAPE,
        scale=1.0,
    )
    for shown in (repr(described), repr(JobKeys(SECRET))):
        for secret in (key, SECRET, rank_token(key, 0)):
            assert not [word for word in spellings(secret) if word in shown]
