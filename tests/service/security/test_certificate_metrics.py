"""What Prometheus sees of the certificates of a process."""

from __future__ import annotations

import urllib.request
from datetime import timedelta
from pathlib import Path

from prometheus_client import CollectorRegistry

from distca.contract.identity import Role
from distca.process.certificates import watch_certificates
from tests.service.security.pki import HOUR, Mounted, Pki, ends
from tests.support.service_harness import running

DAY = timedelta(days=1)


def shown(registry: CollectorRegistry, path: Path, use: str, side: str = "after") -> float | None:
    return registry.get_sample_value(
        f"distca_certificate_not_{side}_timestamp_seconds", {"file": str(path), "use": use}
    )


def test_a_certificate_that_is_replaced_is_seen_at_the_next_scrape(tmp_path: Path) -> None:
    pki, registry = Pki(tmp_path / "pki"), CollectorRegistry()
    mounted = Mounted(tmp_path / "mounted", pki.issue(Role.SERVER, file="first"))
    path = mounted.files.certificate_file
    watch_certificates(registry, own=[path], authorities=[mounted.files.ca_file, None])
    first = ends(path).timestamp()
    assert shown(registry, path, "own") == first
    assert shown(registry, path, "own", "before") == first - 2 * HOUR.total_seconds()
    assert shown(registry, mounted.files.ca_file, "authority") is not None
    later = mounted.put(
        pki.ca_file.read_bytes(), pki.issue(Role.SERVER, file="second", lifetime=DAY)
    )
    assert shown(registry, path, "own") == later.timestamp() > first


def test_of_a_chain_the_first_to_end_counts_and_of_authorities_the_last(tmp_path: Path) -> None:
    pki, registry = Pki(tmp_path / "pki"), CollectorRegistry()
    early = pki.issue(Role.SERVER, file="early").certificate_file
    late = pki.issue(Role.SERVER, file="late", lifetime=DAY).certificate_file
    both = tmp_path / "both.crt"
    both.write_bytes(late.read_bytes() + early.read_bytes())
    watch_certificates(registry, own=[both], authorities=[both])
    assert shown(registry, both, "own") == ends(early).timestamp()
    assert shown(registry, both, "authority") == ends(late).timestamp()


def test_a_file_that_cannot_be_read_now_has_no_value(tmp_path: Path) -> None:
    registry, path = CollectorRegistry(), tmp_path / "tls.crt"
    watch_certificates(registry, own=[path])
    assert shown(registry, path, "own") is None
    path.write_text("-----BEGIN CERTIFICATE-----\nhalf of it")
    assert shown(registry, path, "own") is None


def test_a_control_plane_tells_when_its_certificate_ends(tmp_path: Path) -> None:
    files = Pki(tmp_path).issue(Role.CONTROL_PLANE)
    with running(tls=files.for_server(), metrics_address="127.0.0.1:0") as control_plane:
        url = f"http://{control_plane.metrics_address}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
    assert f'file="{files.certificate_file}",use="own"' in text
    assert f'file="{files.ca_file}",use="authority"' in text
