"""The benchmark of pipelines: its documents, its formulas, and all ways on CPU processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.training import microbatches, pipeline_report
from benchmarks.gpu.training.batches import Batch, CannotRun
from benchmarks.gpu.training.microbatches import Layout, draw_microbatches, squares, unevenness
from benchmarks.gpu.training.pipeline_report import (
    active_stages,
    idle_aware,
    one_f_one_b,
)
from benchmarks.gpu.training.pipeline_ways import NAMES, require_runnable, way_of
from benchmarks.gpu.training.stack import ModelShape
from core_attention.manifest import Manifest, RankManifest, Segment
from tests.support.errors import refused
from tests.support.programs import ran

TOKENS = 128 * 1024


def filled(batch: Batch, layout: Layout) -> bool:
    """Whether every document is in one microbatch, and each of those is full."""
    held = sorted(document for its in layout for document in its)
    tokens = {int(batch.lengths[list(its)].sum()) for its in layout}
    return held == list(range(len(batch.lengths))) and tokens == {batch.tokens_per_rank}


@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_packed_microbatches_are_full_and_as_even_as_whole_documents_allow(
    n: int, seed: int
) -> None:
    batch = draw_microbatches(seed, n, TOKENS, "pretrain", TOKENS)
    packed = microbatches.evenly(batch)
    assert filled(batch, microbatches.as_drawn(batch))
    assert filled(batch, packed)
    # None can be lighter than its longest document, which the shortest ones are put beside.
    longest = int(batch.lengths.max())
    others = TOKENS - longest
    least = longest**2 + others**2 / max(
        1, len(packed[int(np.argmax(squares(packed, batch.lengths)))])
    )
    floor = max(1.0, least / float(np.mean(squares(packed, batch.lengths))))
    assert unevenness(packed, batch.lengths) < 1.03 * floor
    assert unevenness(packed, batch.lengths) <= unevenness(
        microbatches.as_drawn(batch), batch.lengths
    )


def test_halves_that_cut_documents_have_equal_tokens_and_nearly_equal_pairs() -> None:
    for seed in range(5):
        batch = draw_microbatches(seed, 4, TOKENS, "pretrain", TOKENS)
        for held in microbatches.evenly(batch):
            halves = microbatches.cut_in_halves(held, batch.lengths)
            assert [sum(s.length for s in half) for half in halves] == [TOKENS // 2] * 2
            manifest = Manifest.merge([RankManifest(0, 0, halves)], 1)
            assert manifest.n_documents == len(held) + (manifest.n_carried > 0)
            pairs = [sum(s.length * (2 * s.offset + s.length) for s in half) for half in halves]
            longest = int(batch.lengths[list(held)].max())
            # One of L > T / sqrt(2) begins at the first row, which has T / 2 of its queries.
            most = max(1 - (TOKENS / 2 / longest) ** 2, 0.5)
            # 0.08 for the other documents, which are divided by their tokens only.
            assert max(pairs) <= (most + 0.08) * sum(pairs)
    (first, second) = microbatches.cut_in_halves([3], np.array([1, 1, 1, 8]))
    assert (first, second) == ((Segment(3, 8, 0, 4),), (Segment(3, 8, 4, 4),))


def test_formulas() -> None:
    assert active_stages(4, 2) == [1, 2, 2, 2, 1]
    assert active_stages(2, 4) == [1, 2, 2, 2, 1]
    assert one_f_one_b(4, 4, 1.0, 1.0) == 14.0
    # The table of what it is worth, of p = 4 and m = 4 with a = l.
    assert one_f_one_b(4, 4, 1.0, 1.0) / idle_aware(4, 4, 1.0, 1.0) == pytest.approx(1.56, abs=5e-3)
    assert one_f_one_b(4, 8, 1.0, 0.35) / idle_aware(4, 8, 1.0, 0.35) == pytest.approx(
        1.16, abs=5e-3
    )


def test_ways_are_named_and_may_have_another_schedule() -> None:
    assert way_of("idle-aware").schedule == "1f1b"
    assert way_of("idle-aware@zero-bubble").schedule == "zero-bubble"
    table = way_of("idle-aware@zero-bubble:1").table(4, 8)
    assert max(map(table.deferred, range(4))) == 1
    wrong = ("zero-bubble:0", "zero-bubble:", "1f1b:1", "gpipe")
    for name in ("idle", "idle-aware@", *(f"idle-aware@{order}" for order in wrong)):
        with refused():
            way_of(name)


def test_ways_that_cannot_run_are_named() -> None:
    model = ModelShape(layers=8)
    for name in NAMES:
        require_runnable(way_of(name), 4, 4, model, TOKENS, None)
    with pytest.raises(CannotRun):
        require_runnable(way_of("even"), 4, 4, ModelShape(layers=3), TOKENS, None)
    # Four microbatches between both parts of their backward, of 34 GiB each; one of them.
    with pytest.raises(CannotRun):
        require_runnable(way_of("even@zero-bubble"), 4, 4, model, TOKENS, 135 * 2**30)
    require_runnable(way_of("even@1f1b-split"), 4, 4, model, TOKENS, 40 * 2**30)


def test_ways_that_disagree_are_named() -> None:
    def case(way: str, loss: float) -> dict[str, Any]:
        return {"way": way, "microbatches": 4, "steps": [{"seed": 3, "loss": loss, "norm": 1.0}]}

    plan = {"model": {"dtype": "bfloat16"}}
    same = [case("even", 2.0), case("idle-aware", 2.001)]
    assert pipeline_report.disagreements(plan, same) == []
    (wrong,) = pipeline_report.disagreements(plan, [*same, case("idle", 2.1)])
    assert "batch 3: idle has a loss of 2.100000, even 2.000000: 5.0e-02 apart" in wrong
    (wrong,) = pipeline_report.disagreements(plan, [case("even", 2.0), case("idle", float("nan"))])
    assert "nan" in wrong


def command(out: Path, *options: str) -> list[str]:
    return [
        *(sys.executable, "-m", "benchmarks.gpu.pipeline", "--device=cpu", "--tiny"),
        *("--no-compiled", "--stages=2", "--layers=4", "--tokens=1024", "--warm-ups=0"),
        *(f"--json={out}", *options),
    ]


WAYS = (
    "drawn", "even", "idle-aware", "idle-aware@same-phase", "idle-aware@zero-bubble",
    "idle-aware@1f1b-split",
)  # fmt: skip


@pytest.mark.timeout(400)
def test_all_ways_give_the_same_loss_and_gradients(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = (f"--ways={','.join(WAYS)}", "--microbatches=4", "--batches=2", "--verify")
    done = ran(*command(out, *options), timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses and gradients' norms of all ways agree on every batch" in done.stdout
    written = json.loads(out.read_text())
    cases = {case["way"]: case for case in written["cases"]}
    assert {name: case["state"] for name, case in cases.items()} == dict.fromkeys(WAYS, "done")
    for case in cases.values():
        for step in case["steps"]:
            kinds = {kind for rank in step["ranks"] for _, kind, *_ in rank["actions"]}
            assert kinds in ({"F", "B"}, {"F", "I", "W"}, {"F", "B", "I", "W"})
            assert all(0 < share < 1 for share in pipeline_report.bubble(step))
            if way_of(case["way"]).served:
                assert min(step["slots"]["measured"]) >= 1.0
