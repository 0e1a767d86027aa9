"""A control plane of the test's own, whose clock the test sets, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from control_plane.server import ControlPlane
from tests.support.service_harness import Client, TimedControlPlane, client_of, running


@pytest.fixture
def control_plane() -> Iterator[TimedControlPlane]:
    with running() as control_plane:
        yield control_plane


@pytest.fixture
def client(control_plane: ControlPlane) -> Iterator[Client]:
    with client_of(control_plane.address) as client:
        yield client
