"""``distca local --transport nixl``: nodes and trainers of a run take the option."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.end_to_end.local_run import START_SECONDS, LocalRun


@pytest.mark.timeout(300)
def test_a_local_run_trains_over_nixl(tmp_path: Path) -> None:
    run = LocalRun(
        tmp_path, tmp_path, "nixl", "--transport=nixl", "--mode=mixed", "--steps=2", "--verify"
    )
    try:
        ended = run.wait(START_SECONDS)
        assert ended.exit_code == 0, ended.output
        assert run.verified_steps() == 2
        for name in ("node-0", "node-1", "trainer-0", "trainer-1"):
            assert "nixl peer" in (run.folder.logs / f"{name}.log").read_text(), name
    finally:
        run.kill()
