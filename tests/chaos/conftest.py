"""What all scenarios share."""

from __future__ import annotations

import os

import pytest

from tests.chaos.scenario import References

FULL = bool(os.environ.get("DISTCA_CHAOS_FULL"))
"""Whether all scenarios run, which takes about an hour; a short form does otherwise."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("chaos") and not FULL:
            item.add_marker(pytest.mark.skip(reason="takes minutes; make chaos runs it"))


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("undisturbed"))
