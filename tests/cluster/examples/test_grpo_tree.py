"""GRPO on trees, beside GRPO on separate rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from core_attention.shape import parse_shape
from tests.support.cluster import cluster, home, torchrun
from tests.support.programs import ran

FIGURES = re.compile(
    r"loss (\S+), of rows (\S+)  gradients (\S+), of rows (\S+)  (\S+) rows for (\S+) tokens"
)


@pytest.mark.timeout(300)
def test_losses_and_gradients_are_those_of_separate_rows(tmp_path: Path) -> None:
    with cluster(tmp_path, 0) as running:
        environment = {
            **home(tmp_path, parse_shape("4:2:32:float32")),
            "DISTCA_CONTROL_PLANE": running.address,
            "DISTCA_PLACEMENT": "in-place",
            "DISTCA_DATA_HOST": "127.0.0.1",
        }
        ended = ran(*torchrun(2, "-m", "examples.grpo_tree"), env=environment, timeout=250)
        assert ended.returncode == 0, ended.stderr[-6000:]
        assert running.metric("distca_control_plane_plan_seconds_count") >= 16
    found = FIGURES.findall(ended.stdout)
    assert len(found) == 8
    for figures in found:
        loss, of_rows, norm, norm_of_rows, n_rows, n_tokens = (
            float(each.replace(",", "")) for each in figures
        )
        # float32, and up to sixteen steps of AdamW, which divides gradients by their own size.
        assert loss == pytest.approx(of_rows, rel=1e-3, abs=1e-5)
        assert norm == pytest.approx(norm_of_rows, rel=1e-3)
        assert 4 * n_rows < n_tokens
