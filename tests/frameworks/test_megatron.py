"""Megatron-core from its wheel: loss and gradients equal those of float64 attention."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import cluster
from tests.frameworks.ranks import run_ranks

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]


def test_loss_and_gradients_are_those_of_plain_attention(tmp_path: Path) -> None:
    with cluster(tmp_path, 0) as control_plane:
        printed = run_ranks("tests.frameworks.megatron_ranks", 2, tmp_path, control_plane.address)
    assert all(text.count("equal: ") == 10 for text in printed), printed
