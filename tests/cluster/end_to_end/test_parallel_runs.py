"""``distca local --verify`` with tensor parallelism and with pipelines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.end_to_end.conftest import StartRun

pytestmark = pytest.mark.timeout(400)

RUN_SECONDS = 180.0

STAGES = ("--pipeline-stages=2", "--microbatches=2", "--layers=3", "--stage-layers=2,1")
SHARES = "--tensor-parallel=2"
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    "options",
    [
        # With a norm of each head, whose weight all shares have.
        ("--mode=in-place", SHARES, "--model-config={qwen3}"),
        ("--mode=pool", SHARES, "--sharding=fsdp", "--activation-checkpointing"),
        # Replicas by DDP, documents over both, a pool beside the ranks' own servers.
        # Ranks meet before collectives, those of one stage.
        ("--mode=mixed", "--nodes=1", *STAGES),
    ],
    ids=["shares", "shares-fsdp-pool", "stages-ddp-mixed"],
)
def test_replicas_of_shares_and_of_stages_train_as_one_process_does(
    start_run: StartRun, tmp_path: Path, options: tuple[str, ...]
) -> None:
    qwen3 = tmp_path / "qwen3.json"
    qwen3.write_text(json.dumps(QWEN3))
    options = tuple(option.format(qwen3=qwen3) for option in options)
    run = start_run("run", "--trainers=4", "--steps=2", "--verify", *options)
    assert run.wait(RUN_SECONDS).exit_code == 0
    verification = run.record().verification
    assert verification is not None
    assert (verification.steps, verification.passed) == (2, True)


def test_stages_of_shares_go_on_without_shares(start_run: StartRun) -> None:
    """Two stages of two ranks each, in the zero-bubble order and with one weight for embedding and
    head; then the same replica on two ranks, from the checkpoint."""
    shared = ("--trainers=4", SHARES, "--schedule=zero-bubble", "--steps=2")
    run = start_run("run", "--mode=in-place", "--verify", *STAGES, *shared)
    assert run.wait(RUN_SECONDS).exit_code == 0
    whole = ("--trainers=2", "--steps=3", "--resume")
    again = start_run("run", "--mode=in-place", "--verify", *STAGES, *whole)
    assert again.wait(RUN_SECONDS).exit_code == 0
    record = again.record()
    assert [step.step for step in record.steps] == [0, 1, 2]
    assert all((step.gradient_difference or 0.0) < 1e-4 for step in record.steps)
    assert record.steps[-1].loss < record.steps[0].loss


def test_stages_go_on_from_a_run_without_stages(start_run: StartRun) -> None:
    """Its rank has all weights; a nano-batch of it is one of a microbatch."""
    whole = ("--trainers=1", "--nano-batches=4", "--layers=3", "--steps=2")
    run = start_run("run", "--mode=in-place", *whole)
    assert run.wait(RUN_SECONDS).exit_code == 0
    options = ("--mode=in-place", "--verify", "--trainers=2", "--steps=3", "--resume")
    again = start_run("run", *options, *STAGES)
    assert again.wait(RUN_SECONDS).exit_code == 0
    record = again.record()
    assert [step.step for step in record.steps] == [0, 1, 2]
    assert record.steps[-1].loss < record.steps[0].loss


@pytest.mark.parametrize(
    "options",
    [
        ("--trainers=4", "--sharding=replicated"),
        ("--trainers=4", "--sharding=fsdp"),
        # Two stages of two shares each, twice.
        ("--trainers=8", SHARES),
    ],
    ids=["replicated", "fsdp", "shares"],
)
def test_replicas_share_gradients_of_weights_that_come_later(
    start_run: StartRun, options: tuple[str, ...]
) -> None:
    """Backwards in two parts, of layers that are recomputed."""
    schedule = ("--schedule=1f1b-split", "--activation-checkpointing", "--steps=2")
    run = start_run("run", "--mode=in-place", "--verify", *STAGES, *schedule, *options)
    assert run.wait(RUN_SECONDS).exit_code == 0
    verification = run.record().verification
    assert verification is not None
    assert (verification.steps, verification.passed) == (2, True)
    # What each replica has alone is not the sum of both: its gradients would differ by far more.
    assert all((step.gradient_difference or 0.0) < 1e-4 for step in run.record().steps)


def test_heads_that_cannot_be_shared_are_named(start_run: StartRun) -> None:
    options = ("--mode=in-place", "--trainers=4", "--tensor-parallel=4", "--kv-heads=2")
    ended = start_run("run", *options).wait(60.0)
    assert ended.exit_code == 1
    told = "--tensor-parallel is 4, and num_heads_kv is 2; it must be a multiple of the 4"
    assert told in " ".join(ended.output.split())
