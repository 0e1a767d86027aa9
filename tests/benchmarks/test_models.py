"""The benchmark of models with windows, sinks and experts, on CPUs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu import models
from benchmarks.gpu.training.batches import Batch, over_ranks, packed_in_halves
from core_attention.manifest import Segment
from distca.data.batch import IGNORED_LABEL


def test_documents_go_on_in_the_nano_batch_after() -> None:
    batch = Batch(0, (np.array([5, 2, 9]), np.array([8, 8])))
    held = [manifest.nano_batches for manifest in packed_in_halves(batch)]
    assert held == [
        (
            (Segment(0, 5, 0, 5), Segment(1, 2, 0, 2), Segment(2, 9, 0, 1)),
            (Segment(2, 9, 1, 8),),
        ),
        ((Segment(3, 8, 0, 8),), (Segment(4, 8, 0, 8),)),
    ]


def test_documents_go_on_over_nano_batches_and_ranks() -> None:
    batch = Batch(0, (np.array([5, 2, 9]),))
    held = [manifest.nano_batches for manifest in over_ranks(batch, 2)]
    assert held == [
        (
            (Segment(0, 5, 0, 4),),
            (Segment(2, 9, 1, 4),),
        ),
        (
            (Segment(0, 5, 4, 1), Segment(1, 2, 0, 2), Segment(2, 9, 0, 1)),
            (Segment(2, 9, 5, 4),),
        ),
    ]


def test_no_document_predicts_the_next_one() -> None:
    segments = [Segment(0, 3, 0, 3), Segment(1, 1, 0, 1), Segment(2, 4, 0, 2)]
    batch = models.tensors(segments, 99, seed=0, device="cpu")
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 0, 0, 1]
    predicts = [0, 1, 4]
    assert labels[predicts].tolist() == ids[[1, 2, 5]].tolist()
    assert labels[[2, 3]].tolist() == [IGNORED_LABEL] * 2
    rest = models.tensors([Segment(2, 4, 2, 2)], 99, seed=0, device="cpu")
    assert rest["position_ids"][0].tolist() == [2, 3]
    assert labels[5] == rest["input_ids"][0, 0], "its document goes on elsewhere"
    assert rest["labels"][0, 1] == IGNORED_LABEL


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


@pytest.mark.training
@pytest.mark.timeout(300)
def test_documents_over_ranks_train(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    models.main(
        model="tiny-gpt-oss",
        ranks=2,
        tokens=128,
        steps=1,
        device="cpu",
        distribution="one-document",
        spanning=True,
        json_file=out,
    )
    (ranks,) = json.loads(out.read_text())["tiny-gpt-oss"]["ways"].values()
    assert all(rank["edge_waits"][0] > 0.0 for rank in ranks)
    # Random tokens of 512: ln 512 is 6.24.
    assert sum(rank["losses"][0] for rank in ranks) == pytest.approx(6.24, abs=0.1)
