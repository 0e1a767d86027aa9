"""One cluster for the whole folder: starting processes costs more than the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster, cluster


@pytest.fixture(scope="session")
def pool_of_four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane and four pool servers."""
    with cluster(tmp_path_factory.mktemp("cluster"), 4) as running:
        yield running
