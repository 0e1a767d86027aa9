"""The Trainer of transformers and TRL's SFTTrainer train with DistCA as they do with local
attention."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import IterableDataset

from core_attention.errors import ManifestError
from tests import ROOT
from tests.cluster.trainer_client.test_transformers import CONFIGS, make_model
from tests.support.cluster import NODE_SHAPE, Cluster, keep_profile, on_this_host
from trainer_client.loops.trainer import UnsupportedTrainer, serve_trainer

N_RANKS = 2
DEADLINE_SECONDS = 280
TOLERANCES = {
    # float32 through two layers, on the same weights: a few hundred roundings of 6e-8.
    "gradients": 2e-5,
    # Three steps of AdamW in which such gradients are divided by their own size.
    "log": 2e-4,
}
BFLOAT16_TOLERANCES = {
    # Q, K, V, O and their gradients are rounded to 8 bits (4e-3) by kernels that sum differently.
    "gradients": 6e-2,
    "log": 3e-2,
}


@pytest.fixture(scope="module")
def runs(pool_of_four: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks have seen, by run."""
    folder = tmp_path_factory.mktemp("trainer")
    for dtype in ("float32", "bfloat16"):
        keep_profile(folder, dataclasses.replace(NODE_SHAPE, dtype=dtype))
    script = str(ROOT / "tests" / "cluster" / "trainer_client" / "trainer_runs.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*launch, f"--nproc-per-node={N_RANKS}", script, pool_of_four.address, str(folder)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(N_RANKS)]


@pytest.mark.timeout(DEADLINE_SECONDS + 20)
@pytest.mark.parametrize(
    ("name", "placement", "n_steps"),
    [
        # With accumulation of 2, three steps of the optimiser are six of the session; some that
        # were fetched ahead are left out.
        ("plain", "in-place", 6),
        ("plain", "pool", 6),
        ("packing", "pool", 3),
        ("padding-free", "in-place", 3),
        ("lora", "pool", 3),
        ("bfloat16", "in-place", 3),
    ],
)
def test_trains_as_with_local_attention(
    runs: list[dict[str, Any]], name: str, placement: str, n_steps: int
) -> None:
    tolerances = BFLOAT16_TOLERANCES if name == "bfloat16" else TOLERANCES
    for rank in runs:
        local, served = rank[name]["local"], rank[name][placement]
        assert served["steps"] >= n_steps
        assert served["gradients"].keys() == local["gradients"].keys() != set()
        for parameter, gradient in local["gradients"].items():
            expected = torch.tensor(gradient)
            found = torch.tensor(served["gradients"][parameter])
            difference = (found - expected).abs().max() / expected.abs().max()
            assert difference < tolerances["gradients"], parameter
        assert len(local["log"]) >= n_steps // 2
        for mine, theirs in zip(served["log"], local["log"], strict=True):
            assert mine == pytest.approx(theirs, rel=tolerances["log"])


@pytest.mark.timeout(DEADLINE_SECONDS + 20)
def test_resumes_from_a_checkpoint(runs: list[dict[str, Any]]) -> None:
    whole, resumed = (runs[0]["plain"][each]["log"] for each in ("in-place", "resumed"))
    steps = [entry for entry in whole if "loss" in entry]
    again = [entry for entry in resumed if "loss" in entry]
    assert again[-1] == pytest.approx(steps[-1], rel=TOLERANCES["log"])


def trainer(tmp_path: Path, collator: Any = None, **settings: Any) -> transformers.Trainer:
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], **{"max_steps": 1, **settings}
    )
    documents = [{"input_ids": [4, 5, 6][:n]} for n in (3, 2, 3, 1)]
    model = make_model(CONFIGS["Llama"], "distca")
    flattening: Any = transformers.DataCollatorWithFlattening
    untyped: Any = transformers.Trainer
    made: transformers.Trainer = untyped(
        model,
        args,
        data_collator=collator or flattening(),
        train_dataset=documents,
    )
    return made


class Stream(IterableDataset[dict[str, list[int]]]):
    """Documents without a length."""

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter([{"input_ids": [4, 5]}] * 4)


def refuses(served: transformers.Trainer) -> bool:
    """Whether it is refused before a session is opened."""
    with (
        pytest.raises(UnsupportedTrainer),
        serve_trainer(served, control_plane="localhost:1", job="x"),
    ):
        raise AssertionError("never begun")
    return True


@pytest.mark.parametrize(
    "settings",
    [
        {"torch_compile": True},
        {"auto_find_batch_size": True},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"accelerator_config": {"split_batches": True}},
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert refuses(trainer(tmp_path, **settings))


def test_trainers_that_cannot_be_served_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: Any = trainer(tmp_path)
    again.model_init = lambda: make_model(CONFIGS["Llama"], "distca")
    assert refuses(again)
    alone = trainer(tmp_path)
    with monkeypatch.context() as changed:
        changed.setenv("WORLD_SIZE", "2")
        assert refuses(alone)
    # Where there are several ranks, accelerate reads streams on one.
    streaming = trainer(tmp_path)
    streaming.train_dataset = Stream()
    monkeypatch.setattr(type(streaming.args), "world_size", 2)
    assert refuses(streaming)


def options_of(cluster: Cluster, job: str) -> dict[str, Any]:
    keep_profile(cluster.folder, NODE_SHAPE)
    return {
        "control_plane": cluster.address,
        "job": job,
        **on_this_host(cluster.folder),
    }


def test_batches_without_rows_of_the_model_are_refused(
    tmp_path: Path, pool_of_four: Cluster
) -> None:
    """As CPO and ORPO have them, which put chosen and rejected rows together by themselves."""

    def pairs(examples: list[Any]) -> dict[str, torch.Tensor]:
        ids = torch.full((len(examples), 3), 4)
        return {"chosen_input_ids": ids, "rejected_input_ids": ids}

    preferring = trainer(tmp_path, pairs, remove_unused_columns=False)
    refused = pytest.raises(ManifestError)
    with refused, serve_trainer(preferring, **options_of(pool_of_four, "pairs")):
        preferring.train()


class FromOneBuffer(transformers.Trainer):
    """Its loader fills one buffer again and again."""

    def get_train_dataloader(self) -> Any:
        row = torch.empty(1, 6, dtype=torch.int64)
        batch = {"input_ids": row, "labels": row, "position_ids": torch.arange(6)[None]}

        def batches() -> Iterator[dict[str, torch.Tensor]]:
            for step in range(6):
                row.fill_(step)
                yield batch

        return batches()


def test_batches_of_a_loader_that_reuses_its_memory_are_trained_on_in_turn(
    tmp_path: Path, pool_of_four: Cluster
) -> None:
    made: Any = trainer(tmp_path, max_steps=6)
    made.__class__ = FromOneBuffer
    seen: list[int] = []
    made.model.register_forward_pre_hook(
        lambda _, __, named: seen.append(int(named["input_ids"][0, 0])), with_kwargs=True
    )
    with serve_trainer(made, **options_of(pool_of_four, "one-buffer")):
        seen.clear()
        made.train()
    assert seen == list(range(6))


def test_blocks_do_not_nest(tmp_path: Path, pool_of_four: Cluster) -> None:
    served = trainer(tmp_path)
    with serve_trainer(served, **options_of(pool_of_four, "outer")):
        assert refuses(served)
        assert served.train().global_step == 1
    with serve_trainer(served, **options_of(pool_of_four, "after")):
        assert served.train().global_step == 1


def test_batches_with_padding_inside_rows_are_refused_before_the_first_step(
    tmp_path: Path, pool_of_four: Cluster
) -> None:
    def padded(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        rows = [torch.tensor(example["input_ids"]) for example in examples]
        ids = nn.utils.rnn.pad_sequence([*rows, torch.ones(5)], batch_first=True).long()
        mask = (ids > 0).long()
        mask[-1, 2] = 0
        return {"input_ids": ids, "labels": ids, "attention_mask": mask}

    padding = trainer(tmp_path, padded)
    refused = pytest.raises(ManifestError)
    with refused, serve_trainer(padding, **options_of(pool_of_four, "padded")):
        padding.train()
    # As it was before: with attention of its own, any batch will do.
    model: Any = padding.model
    model.set_attn_implementation("sdpa")
    assert padding.train().global_step == 1
