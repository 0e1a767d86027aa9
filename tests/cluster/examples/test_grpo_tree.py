"""GRPO on trees, beside GRPO on separate rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from core_attention.shape import parse_shape
from tests.cluster.others.material import write_material
from tests.support.cluster import NODE_SHAPE, cluster, home, torchrun
from tests.support.programs import ran

FIGURES = re.compile(
    r"loss (\S+), of rows (\S+)  gradients (\S+), of rows (\S+)  (\S+) rows for (\S+) tokens"
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("of_checkpoint", [False, True])
def test_losses_and_gradients_are_those_of_separate_rows(
    tmp_path: Path, of_checkpoint: bool
) -> None:
    options: list[str] = []
    if of_checkpoint:
        write_material(tmp_path)
        tasks = (
            (tmp_path / "prompt" / "train.jsonl").read_text().replace('"}', '", "answer": "t7"}')
        )
        (tmp_path / "tasks.jsonl").write_text(tasks)
        options = [f"--model={tmp_path}/model", f"--data={tmp_path}/tasks.jsonl"]
        options.append(f"--output={tmp_path}/trained")
    with cluster(tmp_path, 0) as running:
        environment = {
            **home(tmp_path, NODE_SHAPE, parse_shape("4:2:32:float32")),
            "DISTCA_CONTROL_PLANE": running.address,
            "DISTCA_PLACEMENT": "in-place",
            "DISTCA_DATA_HOST": "127.0.0.1",
        }
        command = torchrun(2, "-m", "examples.grpo_tree", *options)
        ended = ran(*command, env=environment, timeout=250)
        assert ended.returncode == 0, ended.stderr[-6000:]
        assert running.metric("distca_control_plane_plan_seconds_count") >= 16
    found = FIGURES.findall(ended.stdout)
    assert len(found) == 8
    for figures in found:
        loss, of_rows, norm, norm_of_rows, n_rows, n_tokens = (
            float(each.replace(",", "")) for each in figures
        )
        # float32, and up to sixteen steps of AdamW, which divides gradients by their own size.
        assert loss == pytest.approx(of_rows, rel=1e-3, abs=1e-5)
        assert norm == pytest.approx(norm_of_rows, rel=1e-3)
        assert n_rows < n_tokens / (1 if of_checkpoint else 4)
    if of_checkpoint:
        auto: Any = AutoModelForCausalLM
        before, after = (auto.from_pretrained(tmp_path / each) for each in ("model", "trained"))
        assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
        auto = AutoTokenizer
        assert auto.from_pretrained(tmp_path / "trained")("t7").input_ids == [7]
