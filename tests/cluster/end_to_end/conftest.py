"""One home directory for all runs, so that a cost profile is measured once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.end_to_end.local_run import LocalRun

StartRun = Callable[..., LocalRun]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def start_run(home: Path, tmp_path: Path) -> Iterator[StartRun]:
    """Starts runs in the test's folder; those that still run at its end are killed."""
    runs: list[LocalRun] = []

    def start(name: str, *arguments: str) -> LocalRun:
        run = LocalRun(home, tmp_path, name, *arguments)
        runs.append(run)
        return run

    yield start
    for run in runs:
        run.kill()
