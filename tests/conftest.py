"""Settings for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.support.cluster import Cluster, cluster
from tests.support.process_groups import process_group

# Also where a shell has started the tests in the background, and had it ignored: what is ignored
# here is ignored by every child, and Ctrl-C is what some of them are tested with.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Attention nodes of the tests run with one thread each; so does this process, to share two cores.
torch.set_num_threads(1)

# A busy machine does not make a property false.
hypothesis.settings.register_profile("distca", deadline=None)
hypothesis.settings.load_profile("distca")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """The process group that one rank forms with itself."""
    with process_group(tmp_path):
        yield


@pytest.fixture(scope="session")
def pool_of_four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane and four pool servers, shared by all that disturb none of them."""
    with cluster(tmp_path_factory.mktemp("cluster"), 4) as running:
        yield running
