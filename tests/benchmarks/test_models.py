"""The benchmark of models with windows, sinks and experts, on CPUs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu import models
from distca.data.batch import IGNORED_LABEL


def test_documents_are_cut_where_a_nano_batch_ends() -> None:
    assert models.halves(np.array([5, 2, 9]), 8) == [[5, 2, 1], [8]]
    assert models.halves(np.array([8, 8]), 8) == [[8], [8]]


def test_no_document_predicts_the_next_one() -> None:
    batch = models.tensors([3, 1, 2], 99, seed=0, device="cpu")
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 0, 0, 1]
    predicts = [0, 1, 4]
    assert labels[predicts].tolist() == ids[[1, 2, 5]].tolist()
    others = [row for row in range(len(ids)) if row not in predicts]
    assert set(labels[others].tolist()) == {IGNORED_LABEL}


@pytest.mark.training
@pytest.mark.timeout(300)
def test_both_ways_train_to_the_same_losses(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    models.main(
        model="tiny-gpt-oss",
        ranks=2,
        tokens=256,
        steps=2,
        device="cpu",
        distribution="pretrain",
        frozen="0,1",
        json_file=out,
    )
    figures = json.loads(out.read_text())
    assert list(figures) == ["tiny-gpt-oss", "tiny-gpt-oss, 1 frozen"]
    ways = figures["tiny-gpt-oss"]["ways"]
    plain, served = (
        np.sum([rank["losses"] for rank in ways[way]], axis=0) for way in ("plain", "served")
    )
    # float32: a sum of 1,024 losses, and attention in another order.
    assert served == pytest.approx(plain, rel=1e-5)
    # What plain packing leaves at home is what the plan moves.
    home, planned = np.mean([rank["imbalance"] for rank in ways["served"]], axis=(0, 1))
    assert planned <= home
