"""``distca local`` from start to end, in every way in which it can end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.cluster.end_to_end.conftest import StartRun
from tests.cluster.end_to_end.local_run import Ended, LocalRun, all_gone

pytestmark = pytest.mark.timeout(240)

MESSAGE_SECONDS = 30.0
"""Within which any failure is told and every process is gone."""


N_STEPS = 8

_OF_THE_END = re.compile("lost the control plane|asking to be drained|deregistering")
"""What nodes say that end together with their control plane."""


@dataclass(frozen=True)
class Finished:
    """A run that was left alone.

    Attributes:
        processes: that it had while it trained.
    """

    run: LocalRun
    processes: dict[str, psutil.Process]
    ended: Ended

    @classmethod
    def wait_for(cls, run: LocalRun) -> Finished:
        run.wait_for_steps(1)
        return cls(run, run.processes(), run.wait(150.0))

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.run.steps()]

    def warnings(self) -> list[str]:
        """Of all of its processes, from a first start on."""
        return [
            line
            for path in self.run.folder.logs.glob("*.log")
            for line in path.read_text().splitlines()
            if re.search(r" WARNING |Warning:", line) and not _OF_THE_END.search(line)
        ]

    def check(self, mode: str, n_steps: int) -> None:
        n_nodes = 0 if mode == "in-place" else 2
        assert sorted(self.processes) == sorted(
            ["control-plane 0", "train 0", "train 1"]
            + [f"attention-node {index}" for index in range(n_nodes)]
        )
        assert self.ended.exit_code == 0, self.ended.output
        assert all_gone(self.processes)
        assert self.warnings() == []
        record, steps = self.run.record(), self.run.steps()
        assert record["finished"]
        assert [step.step for step in steps] == list(range(n_steps))
        assert steps[-1].loss < steps[0].loss
        assert self.run.verified_steps() == n_steps
        assert len(record["detail"]["servers"]) == {"pool": 2, "in-place": 2, "mixed": 4}[mode]
        assert all(step.measured_imbalance is not None for step in steps)
        assert "equal to local attention" in self.ended.output
        assert {path.stem for path in self.run.folder.figures.iterdir()} == {
            "loss",
            "imbalance",
            "load",
        }
        assert f"Report: {self.run.folder.report}" in self.ended.output


@pytest.fixture(scope="module")
def undisturbed(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """In-place and in one go: what runs of other ways and in parts are compared with."""
    root = tmp_path_factory.mktemp("undisturbed")
    run = LocalRun(home, root, "run", "--mode=in-place", f"--steps={N_STEPS}", "--verify")
    try:
        yield Finished.wait_for(run)
    finally:
        run.kill()


def test_run_in_place_finishes_verified_with_a_report(undisturbed: Finished) -> None:
    undisturbed.check("in-place", N_STEPS)


@pytest.mark.parametrize(("mode", "dtype"), [("pool", "float32"), ("mixed", "bfloat16")])
def test_run_with_nodes_finishes_verified_with_a_report(
    start_run: StartRun, mode: str, dtype: str
) -> None:
    run = start_run("run", f"--mode={mode}", f"--dtype={dtype}", "--steps=4", "--verify")
    Finished.wait_for(run).check(mode, 4)


SHARDED = ("--mode=in-place", "--sharding=fsdp", "--verify")
"""FSDP2, with layers recomputed but for core attention."""


def test_sharded_and_recomputed_layers_train_as_whole_ones_do(start_run: StartRun) -> None:
    run = start_run("run", *SHARDED, "--dtype=bfloat16", "--steps=3")
    ended = run.wait(150.0)
    assert ended.exit_code == 0, ended.output
    assert run.verified_steps() == 3


def test_sharded_run_goes_on_from_its_checkpoint(
    start_run: StartRun, undisturbed: Finished
) -> None:
    """The checkpoint holds whole weights and moments, gathered from all ranks. The first part has
    none to go on from, and begins."""
    for n_steps in (2, 4):
        part = start_run("halves", *SHARDED, "--resume-or-start", f"--steps={n_steps}")
        assert part.wait(150.0).exit_code == 0
        assert part.verified_steps() == 2
    losses = [step.loss for step in part.steps()]
    # Sums are rounded differently, and the planner's profile may be corrected.
    assert losses == pytest.approx(undisturbed.losses[:4], rel=1e-5)


@pytest.mark.parametrize(
    ("victim", "name"),
    [
        ("train 1", "trainer 1"),
        ("attention-node 0", "node-0"),
        ("control-plane 0", "control-plane"),
    ],
)
def test_killed_process_ends_the_run_and_is_named(
    start_run: StartRun, victim: str, name: str
) -> None:
    run = start_run("run", "--steps=100000")
    run.wait_for_steps(2)
    processes = run.processes()
    processes[victim].kill()
    ended = run.wait(MESSAGE_SECONDS)
    assert ended.exit_code == 1
    assert f"DistcaError: {name} (pid {processes[victim].pid}) was killed" in ended.output
    assert f"Logs: {run.folder.logs}" in ended.output
    assert all_gone(processes)


def test_interrupted_and_resumed_run_gives_the_losses_of_an_undisturbed_one(
    start_run: StartRun, undisturbed: Finished
) -> None:
    """In one go and in two, in-place: the plan of a step is then made of the same servers, but
    the planner's profile may have been corrected, so tasks are cut elsewhere and sums rounded
    differently: hence a tolerance of a few float32 roundings in the loss."""
    first = start_run("halves", "--mode=in-place", f"--steps={N_STEPS}", "--checkpoint-every=1")
    first.wait_for_steps(2)
    processes = first.processes()
    first.interrupt()
    ended = first.wait(MESSAGE_SECONDS)
    assert ended.exit_code == 130, ended.output
    assert all_gone(processes)
    checkpoint = first.folder.newest_checkpoint()
    assert checkpoint is not None
    assert f"Checkpoint: {checkpoint}" in ended.output
    done = len(first.steps())
    assert checkpoint.name == f"step-{done:08d}.pt"
    assert 2 <= done < N_STEPS, "it was to be stopped on the way"
    rest = start_run("halves", "--mode=in-place", f"--steps={N_STEPS}", "--resume")
    assert rest.wait(150.0).exit_code == 0
    losses = [step.loss for step in rest.steps()]
    assert losses == pytest.approx(undisturbed.losses, rel=1e-5)
