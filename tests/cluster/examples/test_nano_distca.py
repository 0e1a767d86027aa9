"""The small version of the method beside plain attention."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import matplotlib
import pytest
import torch

from examples.nano_distca.documents import random_lengths
from examples.nano_distca.exchange import Death
from examples.nano_distca.job import random_job, run
from examples.nano_distca.plan import home_plan, imbalance
from examples.nano_distca.reference import deviation, reference
from tests import ROOT
from tests.support.programs import ran

N_RANKS, N_SERVERS = 3, 4
FOLDER = ROOT / "examples" / "nano_distca"

CASES = {
    "odd lengths": [7, 131, 33, 5, 257, 91, 1, 63],
    "one token": [1],
    "one huge document": [1203],
    "many tiny documents": [1, 2, 3, 1, 5] * 20,
    "documents over ranks": [401, 399, 77, 203],
}
DEATHS = {
    "calm": None,
    "dies in the first tick": Death(N_RANKS, 0),
    "dies between replies": Death(N_RANKS, 5, replies=1),
    "dies after the last reply": Death(N_RANKS, 7, replies=N_RANKS),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_plain_attention(case: str) -> None:
    job = random_job(CASES[case], N_RANKS, N_SERVERS)
    right = reference(job)
    calm = run(job)
    # float32 through two layers and sums over a thousand rows.
    assert deviation(calm.gradients, right) < 5e-6
    for name, death in DEATHS.items():
        shaken = run(replace(job, death=death))
        for gradient in right:
            assert torch.equal(shaken.gradients[gradient], calm.gradients[gradient]), name
        has_work = death and any(plan.tasks[N_RANKS] for plan in job.plans)
        assert not has_work or shaken.dead <= {N_RANKS}, name


def test_a_server_with_work_dies() -> None:
    job = random_job(CASES["odd lengths"], N_RANKS, N_SERVERS)
    done = run(replace(job, death=Death(N_RANKS, 2, replies=1)))
    assert done.dead == {N_RANKS}
    stood_in = {p for p, events in done.events.items() if any(e.kind == "stand-in" for e in events)}
    assert len(stood_in) == 1


@pytest.mark.parametrize("seed", range(20))
def test_plans_keep_the_tolerance_and_lose_no_query(seed: int) -> None:
    lengths = random_lengths(60, median=150, longest=2000, seed=seed)
    job = random_job(lengths, N_RANKS, N_SERVERS)
    for batch, plan in zip(job.lanes, job.plans, strict=True):
        before = [*home_plan(batch, job.cost).loads, 0.0]
        # 16 queries at the end of the longest document are a hundredth of a server's load.
        assert imbalance(plan.loads) <= min(imbalance(tuple(before)), 1 + job.tolerance + 0.01)
        ranges: dict[int, list[tuple[int, int]]] = {}
        for task in sorted(task for tasks in plan.tasks for task in tasks):
            ranges.setdefault(task.document, [(0, 0)]).append((task.q_begin, task.q_end))
        for document, length in enumerate(batch.lengths):
            found = ranges[document]
            assert [begin for begin, _ in found[1:]] == [end for _, end in found[:-1]]
            assert found[-1][1] == length


def test_lanes_take_turns() -> None:
    done = run(random_job(CASES["documents over ranks"], N_RANKS, N_SERVERS))
    for process, events in done.events.items():
        tasks = [event for event in events if event.kind == "tasks"]
        assert [event.lane for event in tasks] == [0, 1] * 4
        linear = [event for event in events if event.kind == "linear"]
        # Rows of lane 1 leave after this, and before tasks of lane 0 are computed.
        assert process >= N_RANKS or linear[1].lane == 1
        assert process >= N_RANKS or linear[1].end <= tasks[0].begin


def test_the_program_says_that_nothing_changed() -> None:
    said = ran(sys.executable, "-m", "examples.nano_distca", check=True).stdout
    assert "equal to the bit: True" in said


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code cells, one after another, as a notebook does; nothing is shown."""
    matplotlib.use("Agg")
    monkeypatch.setattr(sys, "path", [*sys.path])
    names: dict[str, object] = {"__name__": "notebook"}
    for cell in json.loads((FOLDER / "nano_distca.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    figure = names["figure"]
    assert isinstance(figure, matplotlib.figure.Figure)
