"""What the documentation has readers type, on a CPU: torchrun starts the ranks."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests import ROOT
from tests.support.cluster import cluster
from tests.support.programs import ran

pytestmark = pytest.mark.timeout(700)

SHORT = {
    # FSDP2's newer interface, torchtitan's default, is not in the torch that runs here.
    "torchtitan": "--training.steps 2 --training.seq_len 256 "
    "--parallelism.spmd_backend partial_dtensor --distca.control_plane localhost:7700",
    "megatron": "--steps 2 --tokens 64",
}


def command_in_docs(framework: str) -> str:
    text = (ROOT / "docs" / "frameworks.md").read_text()
    (found,) = re.findall(rf"^torchrun .*examples\.{framework}.*$", text, re.MULTILINE)
    return str(found)


def run_on_cpu(command: list[str], framework: str, folder: Path) -> str:
    """What it printed; torchtitan writes its outputs into ``folder``."""
    paths = [ROOT / "tests" / "cluster" / "frameworks" / "on_cpu", ROOT]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONWARNINGS": "ignore",
        "ON_CPU": framework,
        "OMP_NUM_THREADS": "1",
    }
    ended = ran(*command, env=environment, cwd=folder, timeout=600)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("framework", ["torchtitan", "megatron"])
def test_the_examples_run_as_the_documentation_says(framework: str, tmp_path: Path) -> None:
    command = f"{command_in_docs(framework)} {SHORT[framework]}"
    with cluster(tmp_path, 0) as control_plane:
        program, *arguments = command.replace("localhost:7700", control_plane.address).split()
        assert program == "torchrun"
        # As torchrun itself, which is not there if this environment sees torch of another one.
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        printed = run_on_cpu([*torchrun, *arguments], framework, tmp_path)
    losses = re.findall(r"loss:? +([0-9.]+)", printed)
    assert len(losses) >= 2, printed[-3000:]


def test_torchtitan_trains_a_checkpoint_of_hugging_faces(tmp_path: Path) -> None:
    auto: Any = AutoModelForCausalLM
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 2048}
    model = auto.from_config(AutoConfig.for_model("llama", **sizes))
    model.save_pretrained(tmp_path / "model")
    text = (ROOT / "docs" / "frameworks.md").read_text()
    (options,) = re.findall(r"^--hf_assets_path FOLDER .*$", text, re.MULTILINE)
    command = " ".join([command_in_docs("torchtitan"), SHORT["torchtitan"], options])
    with cluster(tmp_path, 0) as control_plane:
        command = command.replace("localhost:7700", control_plane.address)
        command = command.replace("FOLDER", str(tmp_path / "model"))
        run_on_cpu(
            [sys.executable, "-m", "torch.distributed.run", *command.split()[1:]],
            "torchtitan",
            tmp_path,
        )
    (saved,) = tmp_path.glob("**/step-2")
    shutil.copy(tmp_path / "model" / "config.json", saved)
    trained = auto.from_pretrained(saved).state_dict()
    for name, before in model.state_dict().items():
        # Two steps of AdamW with this learning rate; random weights differ by a hundred times that.
        assert 0 < (trained[name] - before).abs().max() < 1e-3, name


@pytest.mark.parametrize(
    ("framework", "ways"),
    [
        ("torchtitan", ("plain", "served", "served-at-documents")),
        ("megatron", ("plain", "served")),
    ],
)
def test_the_benchmark_runs_tiny(framework: str, ways: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.frameworks", "--tiny", "--layers", "1"]
    command += ["--framework", framework, "--attention", ",".join(ways)]
    printed = run_on_cpu([*command, "--tokens", "64", "--steps", "4"], framework, tmp_path)
    rows = [line for line in printed.splitlines() if line.startswith(f"│ {framework}")]
    assert len(rows) == len(ways), printed[-3000:]
    losses_by_way = []
    for row, expected in zip(rows, ways, strict=True):
        _, layout, way, *_, losses = row.strip("│").split("│")
        assert (layout.split(), way.strip()) == (["PP", "1", "TP", "1"], expected)
        losses_by_way.append([float(loss) for loss in losses.split()])
    # Sums of tasks in another order; six digits are printed.
    for losses_of_way in losses_by_way[1:]:
        assert losses_by_way[0] == pytest.approx(losses_of_way, rel=1e-4)
