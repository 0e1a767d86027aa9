"""Tests of the nixl transport, in a process of their own: nixl and ucxx each bring a UCX, and two
of them in one process crash."""

from __future__ import annotations

import pytest

from data_plane.nixl.agent import import_nixl


@pytest.fixture(scope="session", autouse=True)
def nixl() -> None:
    """Skips all of it where the library is not installed."""
    try:
        import_nixl()
    except ImportError as error:
        pytest.skip(str(error))
