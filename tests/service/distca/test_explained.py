"""Where gRPC says little: certificates that nobody accepts, and names that nobody knows."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

import pytest

from distca.apps.commands.explained import explained
from distca.cli import command_line
from distca.contract.identity import Role
from tests.service.security.pki import HOUR, Files, Pki

SOON = timedelta(minutes=5)


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


def expired(pki: Pki) -> Files:
    return pki.issue(Role.TRAINER, starts_in=-2 * HOUR, lifetime=-HOUR)


def test_a_certificate_that_has_ended_is_told_of_once(
    pki: Pki, caplog: pytest.LogCaptureFixture
) -> None:
    path = expired(pki).certificate_file

    def fails() -> None:
        with explained(certificate=path):
            assert f"certificate {path}: EXPIRED " in caplog.text
            assert caplog.text.rstrip().endswith("others refuse it: replace the file")
            raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        fails()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_certificate_that_ends_while_a_process_runs_is_told_of_where_it_fails(
    pki: Pki, caplog: pytest.LogCaptureFixture
) -> None:
    path = pki.issue(Role.TRAINER).certificate_file

    def fails() -> None:
        with explained(certificate=path):
            assert not caplog.records
            expired(pki)
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        fails()
    assert f"certificate {path}: EXPIRED " in caplog.text


def test_what_is_well_is_not_mentioned(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    for path in (None, pki.folder / "none", pki.issue(Role.TRAINER).certificate_file):
        with (
            pytest.raises(ValueError, match="bug"),
            explained(certificate=path, control_plane="127.0.0.1:1, [::1]:1", listen=None),
        ):
            raise ValueError("bug")
    assert not caplog.records


def test_each_name_that_cannot_be_looked_up_is_told_of_where_the_block_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = "127.0.0.1:1, nohost.invalid:7700"
    with explained(certificate=None, control_plane=names):
        pass
    assert not caplog.records
    with (
        pytest.raises(ValueError, match="no connection"),
        explained(certificate=None, control_plane=names),
    ):
        raise ValueError("no connection")
    (record,) = caplog.records
    assert "and 'nohost.invalid' cannot be looked up: " in record.getMessage()


@pytest.mark.parametrize("address", ["cp..svc:7700", f"{'a' * 64}.svc:7700", "cp:port"])
def test_a_name_that_cannot_be_one_hides_no_error(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        pytest.raises(ConnectionError, match="no answer"),
        explained(certificate=None, control_plane=address),
    ):
        raise ConnectionError("no answer")
    assert f"control_plane is {address!r}, and " in caplog.text


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("listen_address", ["control-plane", "--listen={nowhere}"]),
        (
            "metrics_address",
            ["control-plane", "--listen=127.0.0.1:0", "--metrics-listen={nowhere}"],
        ),
        ("control_plane", ["top", "--once", "--control-plane={nowhere}", "--timeout-seconds=0.2"]),
        (
            "control_plane",
            [
                "attention-node",
                "--control-plane={nowhere}",
                "--shape=1:1:8:float32",
                "--data-host=127.0.0.1",
                "--profile-dir={here}",
                "--connect-seconds=0.2",
            ],
        ),
    ],
)
def test_a_name_that_nobody_knows_is_told_of_with_its_option(
    field: str, arguments: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled = [each.format(nowhere="nohost.invalid:7700", here=tmp_path) for each in arguments]
    with pytest.raises(Exception, match=r"nohost\.invalid"):
        command_line()(filled, standalone_mode=False)
    assert f"{field} is 'nohost.invalid:7700', and 'nohost.invalid' cannot be" in caplog.text


@pytest.mark.parametrize("role", [Role.CONTROL_PLANE, Role.SERVER, Role.TRAINER, Role.READ_ONLY])
def test_every_process_looks_at_its_own_certificate(
    pki: Pki, role: Role, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = pki.issue(role, starts_in=-2 * HOUR, lifetime=-HOUR)
    own = [f"--tls-certificate={files.certificate_file}", f"--tls-key={files.key_file}"]
    client = ["--control-plane=127.0.0.1:1", f"--tls-ca={files.ca_file}", *own]
    run, arguments = {
        Role.CONTROL_PLANE: ("control_plane.server.run", ["control-plane", *own]),
        Role.SERVER: (
            "attention_node.server.run",
            ["attention-node", "--shape=1:1:8:float32", "--data-host=127.0.0.1", *client],
        ),
        Role.TRAINER: (
            "distca.apps.train.run.run_trainer",
            ["train", f"--run-dir={pki.folder}/run", "--rendezvous=file:///none", *client],
        ),
        Role.READ_ONLY: ("distca.apps.top.run.watch", ["top", *client]),
    }[role]
    monkeypatch.setattr(run, lambda *_: True)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    command_line()(arguments, standalone_mode=False)
    assert f"certificate {files.certificate_file}: EXPIRED " in caplog.text
