"""The tutorial's commands run one after the other, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from core_attention.shape import parse_shape
from tests import ROOT
from tests.support.cluster import keep_profile
from tests.support.pages import run_page


@pytest.mark.timeout(400)
def test_the_tutorial_trains_with_and_without_distca(tmp_path: Path) -> None:
    cache = tmp_path / ".cache" / "distca"
    cache.mkdir(parents=True)
    keep_profile(cache, parse_shape("4:2:32:float32"))
    page = ROOT / "docs" / "tutorial.md"
    printed = run_page(page, "make test-training", tmp_path, timeout=380)
    assert "equal to local attention" in printed
    losses = re.findall(r"^step (\d) loss ([\d.]+)(.*)", printed, re.MULTILINE)
    runs = [losses[begin : begin + 4] for begin in range(0, len(losses), 4)]
    in_place, local, mixed = [[(step, loss) for step, loss, _ in run] for run in runs]
    assert in_place == local == mixed
    assert all("distca/imbalance" in balance for *_, balance in runs[0][1:] + runs[2][1:])
