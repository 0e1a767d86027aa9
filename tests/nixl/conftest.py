"""These tests run by themselves (``make test-nixl``): nixl and ucxx each bring a UCX, and two of
them in one process crash."""

from __future__ import annotations

import pytest

from data_plane.nixl.agent import import_nixl


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "nixl" not in config.option.markexpr:
        unwanted = [item for item in items if item.get_closest_marker("nixl")]
        items[:] = [item for item in items if item not in unwanted]
        config.hook.pytest_deselected(items=unwanted)


@pytest.fixture(scope="session", autouse=True)
def nixl() -> None:
    """Skips what needs the library, where it is not installed."""
    try:
        import_nixl()
    except ImportError as error:
        pytest.skip(str(error))
