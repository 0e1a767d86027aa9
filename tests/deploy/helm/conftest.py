"""All tests here need the chart's tools; without them they are skipped, and say how to get them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.helm.chart import tools_are_there

_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if tools_are_there():
        return
    skipped = pytest.mark.skip(reason="needs python tools/fetch_chart_tools.py (make chart)")
    for item in items:
        if _FOLDER in item.path.parents:
            item.add_marker(skipped)
