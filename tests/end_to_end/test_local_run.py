"""``distca local`` from start to end, in every way in which it can end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.conftest import StartRun
from tests.end_to_end.local_run import all_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

MESSAGE_SECONDS = 30.0
"""Within which any failure is told and every process is gone."""


@pytest.mark.parametrize(
    ("mode", "dtype"), [("pool", "float32"), ("mixed", "float32"), ("in-place", "bfloat16")]
)
def test_run_finishes_verified_with_a_report(start_run: StartRun, mode: str, dtype: str) -> None:
    run = start_run("run", f"--mode={mode}", f"--dtype={dtype}", "--steps=4", "--verify")
    run.wait_for_steps(1)
    processes = run.processes()
    n_nodes = 0 if mode == "in-place" else 2
    assert sorted(processes) == sorted(
        ["control-plane 0", "train 0", "train 1"]
        + [f"attention-node {index}" for index in range(n_nodes)]
    )
    ended = run.wait(120.0)
    assert ended.exit_code == 0, ended.output
    assert all_gone(processes)
    record = run.record()
    assert record.finished
    assert [step.step for step in record.steps] == [0, 1, 2, 3]
    assert record.steps[-1].loss < record.steps[0].loss
    assert record.verification is not None
    assert record.verification.steps == 4
    assert record.verification.passed
    assert record.detail is not None
    assert len(record.detail.servers) == {"pool": 2, "in-place": 2, "mixed": 4}[mode]
    assert all(step.measured_imbalance is not None for step in record.steps)
    assert "equal to local attention" in ended.output
    assert {path.stem for path in run.folder.figures.iterdir()} == {
        "loss",
        "imbalance",
        "load",
        "timeline",
        "bytes",
    }
    assert f"Report: {run.folder.report}" in ended.output


@pytest.mark.parametrize("cut", [(), ("--cut-documents",)], ids=["whole", "cut"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharded_and_recomputed_layers_train_as_whole_ones_do(
    start_run: StartRun, dtype: str, cut: tuple[str, ...]
) -> None:
    """FSDP2 under ping-pong, with core attention left out of activation checkpoints: every gradient
    is compared with local attention's."""
    options = (
        "--sharding=fsdp", "--activation-checkpointing", "--loss-chunk-tokens=50",
        "--host-barriers", *cut,
    )  # fmt: skip
    run = start_run("run", "--mode=in-place", f"--dtype={dtype}", "--steps=3", "--verify", *options)
    assert run.wait(150.0).exit_code == 0
    verification = run.record().verification
    assert verification is not None
    assert (verification.steps, verification.passed) == (3, True)


def test_stages_of_a_pipeline_train_as_one_process_does(start_run: StartRun) -> None:
    """The zero-bubble order with unequal stages; embedding and head are one weight."""
    options = (
        "--pipeline-stages=2", "--microbatches=2", "--schedule=zero-bubble", "--layers=3",
        "--stage-layers=2,1",
    )  # fmt: skip
    whole = ("--mode=in-place", "--verify", *options)
    run = start_run("run", *whole, "--steps=2")
    assert run.wait(150.0).exit_code == 0
    detail = run.record().detail
    assert detail is not None
    assert len(detail.planned_slots) == len(detail.measured_slots) > 0
    assert all(step.planned_imbalance is not None for step in run.record().steps)
    again = start_run("run", *whole, "--steps=3", "--resume")
    assert again.wait(150.0).exit_code == 0
    verification = again.record().verification
    assert verification is not None
    assert (verification.steps, verification.passed) == (1, True)


def test_sharded_run_goes_on_from_its_checkpoint(start_run: StartRun) -> None:
    """The checkpoint holds whole weights and moments, gathered from all ranks. The first part has
    none to go on from, and begins."""
    options = ("--mode=in-place", "--sharding=fsdp", "--resume-or-start")
    whole = start_run("whole", "--mode=in-place", "--sharding=fsdp", "--steps=4")
    assert whole.wait(150.0).exit_code == 0
    first = start_run("halves", *options, "--steps=2")
    assert first.wait(150.0).exit_code == 0
    rest = start_run("halves", *options, "--steps=4")
    assert rest.wait(150.0).exit_code == 0
    losses = [step.loss for step in rest.record().steps]
    # The planner's profile may have been corrected, so sums are rounded differently.
    assert losses == pytest.approx([step.loss for step in whole.record().steps], rel=1e-5)


@pytest.mark.parametrize(
    ("victim", "name"),
    [
        ("train 1", "trainer 1"),
        ("attention-node 0", "attention node 0"),
        ("control-plane 0", "control plane"),
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
    assert f"ProcessFailedError: {name} (pid {processes[victim].pid}) was killed" in ended.output
    assert f"Logs: {run.folder.logs}" in ended.output
    assert all_gone(processes)


def test_interrupted_and_resumed_run_gives_the_losses_of_an_undisturbed_one(
    start_run: StartRun,
) -> None:
    """In one go and in two, in-place: the plan of a step is then made of the same servers, but
    the planner's profile may have been corrected, so tasks are cut elsewhere and sums rounded
    differently: hence a tolerance of a few float32 roundings in the loss."""
    n_steps = 8
    whole = start_run("whole", "--mode=in-place", f"--steps={n_steps}")
    assert whole.wait(150.0).exit_code == 0
    first = start_run("halves", "--mode=in-place", f"--steps={n_steps}", "--checkpoint-every=1")
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
    assert 2 <= done < n_steps, "it was to be stopped on the way"
    rest = start_run("halves", "--mode=in-place", f"--steps={n_steps}", "--resume")
    assert rest.wait(150.0).exit_code == 0
    losses = [step.loss for step in rest.record().steps]
    assert losses == pytest.approx([step.loss for step in whole.record().steps], rel=1e-5)


def test_bad_data_is_told_before_anything_starts(start_run: StartRun, tmp_path: Path) -> None:
    run = start_run("run", f"--data={tmp_path / 'absent'}")
    ended = run.wait(30.0)
    assert ended.exit_code == 1
    assert f"DataError: data path {tmp_path / 'absent'} does not exist" in ended.output
    assert not run.folder.root.exists()


def test_earlier_run_of_the_name_is_kept(start_run: StartRun) -> None:
    folder = start_run("run", "--data=/absent").folder
    folder.logs.mkdir(parents=True)
    ended = start_run("run").wait(30.0)
    assert ended.exit_code == 1
    assert "RunFolderError" in ended.output
    assert "holds a run already" in ended.output
    assert "Logs:" not in ended.output, "that would be the earlier run's"
