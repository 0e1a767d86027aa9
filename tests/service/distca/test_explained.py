"""Where gRPC says little: certificates that nobody accepts. What it says itself, by the runbook."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distca.contract.identity import Role
from distca.contract.rpc import RpcSettings, open_channel, wait_until_ready
from distca.contract.rpc_errors import Reason, RpcError
from distca.contract.tls import CertificateFiles
from distca.process.monitoring import MetricsEndpoint, process_registry
from tests import ROOT
from tests.service.distca.test_doctor import localhost
from tests.service.security.pki import HOUR, Files, Pki
from tests.support.addresses import unused_port
from tests.support.service_harness import running

_ROW = re.compile(r"^\| (`.*?`(?:, `.*?`)*) \|", re.MULTILINE)


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


def expired(pki: Pki) -> Files:
    return pki.issue(Role.TRAINER, starts_in=-2 * HOUR, lifetime=-HOUR)


def warned_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Files of the certificates that were warned of."""
    assert {record.levelno for record in caplog.records} <= {logging.WARNING}
    return [re.findall(r"certificate (\S+)", each.getMessage())[0] for each in caplog.records]


def test_a_certificate_that_has_ended_is_told_of_once(
    pki: Pki, caplog: pytest.LogCaptureFixture
) -> None:
    good = pki.issue(Role.TRAINER)
    files = CertificateFiles(authority=None, certificate=good.certificate_file, key=good.key_file)
    files.changed()
    assert not caplog.records
    path = expired(pki).certificate_file
    assert path == good.certificate_file
    for _ in range(2):
        files.changed()
        assert warned_of(caplog) == [str(path)]


def words_of(row: int) -> list[str]:
    """What gRPC says, by a row of the runbook's table."""
    section = (
        (ROOT / "docs" / "runbook.md").read_text().partition("## When no call gets through")[2]
    )
    return re.findall(r"`(.*?)`", _ROW.findall(section)[row])


def says(row: int, address: str, **settings: Any) -> None:
    """Fails unless a client of ``address`` is told what ``row`` of the runbook lists."""
    asked = RpcSettings(address=address, connect_seconds=1.0, **settings)
    with open_channel(asked) as channel, pytest.raises(RpcError) as failed:
        wait_until_ready(channel, asked)
    assert failed.value.reason is Reason.UNAVAILABLE
    assert any(words in failed.value.details for words in words_of(row)), failed.value.details


@contextmanager
def serving_tls(pki: Pki, *, asks: bool) -> Iterator[str]:
    """A control plane with TLS, which asks for certificates or not; at one address of this host,
    since gRPC speaks of the last that it has tried."""
    files = pki.issue(Role.CONTROL_PLANE).for_server()
    with running(tls=files if asks else replace(files, client_ca_file=None)) as control_plane:
        yield f"127.0.0.1:{localhost(control_plane.address).rpartition(':')[2]}"


def test_the_runbook_has_what_grpc_says_of_certificates(pki: Pki, tmp_path: Path) -> None:
    ca = {"ca_file": pki.ca_file}
    other = Pki(tmp_path / "other").issue(Role.OPERATOR).for_client()
    own = pki.issue(Role.OPERATOR).for_client()
    with running() as control_plane:
        says(2, control_plane.address, **own)
    with serving_tls(pki, asks=False) as address:
        says(3, address)
    with serving_tls(pki, asks=True) as address:
        for wrong in ({}, ca, {**other, **ca}, expired(pki).for_client()):
            says(3, address, **wrong)
        for wrong in (other, {**own, "server_name": "elsewhere.example"}):
            says(4, address, **wrong)


def test_the_runbook_has_what_grpc_says_of_others() -> None:
    says(0, f"127.0.0.1:{unused_port()}")
    says(1, "cp..svc:7700")
    with closing(MetricsEndpoint("127.0.0.1", 0, process_registry("trainer"))) as endpoint:
        says(5, f"127.0.0.1:{endpoint.port}")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        says(6, f"127.0.0.1:{silent.getsockname()[1]}")
