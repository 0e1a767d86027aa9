"""Others' scripts and loops train with core attention served as they do by themselves: nothing but
environment variables and the name of an attention implementation differs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trl.scripts

from tests import ROOT
from tests.cluster.others.material import write_material
from tests.support.cluster import NODE_SHAPE, Cluster, cluster, home, torchrun
from tests.support.programs import ran

pytestmark = pytest.mark.timeout(600)

CLOSE = 1e-5
"""Some hundred roundings of float32 in four steps of SGD. The losses of GRPO and RLOO are sums that
cancel to nothing."""

_OF_TRL = [
    "--output_dir=out --use_cpu --report_to=none --disable_tqdm=True --bf16=False --dtype=float32",
    "--optim=sgd --learning_rate=0.1 --max_steps=3 --logging_steps=1 --save_steps=3",
    "--per_device_train_batch_size=4",
]
_SAMPLED = [
    "--reward_funcs=tests.cluster.others.material.reward --num_generations=2",
    "--max_completion_length=8 --beta=0.1",
]
_PACKED_ADAPTERS = [
    "--packing --max_length=64 --eval_strategy=steps --eval_steps=1",
    "--gradient_accumulation_steps=2 --use_peft --lora_target_modules q_proj v_proj",
]
_LOGGED = ("loss", "eval_loss", "grad_norm", "reward", "kl", "completions/mean_length")


@dataclass(frozen=True)
class Case:
    """A script.

    Attributes:
        command: what torchrun gets; ``{model}``, ``{data}`` and ``{implementation}`` are filled in.
        n_steps: forward passes with gradients on each rank, at least.
        environment: of the served run besides the control plane's address.
    """

    command: tuple[str, ...]
    n_steps: int = 4
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def implementation(self) -> str:
        """The name that the served run asks for."""
        return self.environment.get("DISTCA_REPLACES", "distca")


def of_trl(script: str, data: str, *options: str, **environment: str) -> Case:
    path = str(Path(trl.scripts.__path__[0], f"{script}.py"))
    named = "--model_name_or_path={model} --attn_implementation={implementation}"
    given = [named, f"--dataset_name={{data}}/{data}", *_OF_TRL, *options]
    return Case((path, *" ".join(given).split()), 3, environment)


def of_loop(name: str, **environment: str) -> Case:
    arguments = ("-m", "tests.cluster.others.loops", name, "{model}", "{implementation}")
    return Case(arguments, environment=environment)


REPLACES = {"DISTCA_REPLACES": "flash_attention_2"}
CASES = {
    "trl sft": of_trl("sft", "text"),
    "trl sft, packed, adapters": of_trl("sft", "text", *_PACKED_ADAPTERS, **REPLACES),
    "trl dpo": of_trl("dpo", "preference", DISTCA_PLACEMENT="pool"),
    "trl grpo": of_trl("grpo", "prompt", *_SAMPLED),
    "trl rloo": of_trl("rloo", "prompt", *_SAMPLED, **REPLACES),
    "transformers": of_loop("trainer", **REPLACES),
    "accelerate": of_loop("accelerate", DISTCA_PLACEMENT="mixed"),
    "lightning": of_loop("lightning"),
    "verl": of_loop("verl", **REPLACES),
    "fsdp1": of_loop("fsdp1"),
    "zero3": of_loop("zero3"),
    "tensor parallel": of_loop("tensor_parallel"),
}


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("others"), 2) as running:
        yield running


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    write_material(folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_trains_as_by_itself(name: str, tmp_path: Path, two_nodes: Cluster, material: Path) -> None:
    case = CASES[name]
    plain = run(case, "sdpa", tmp_path / "plain", material, {})
    before = two_nodes.metric("distca_control_plane_plan_seconds_count")
    address = {"DISTCA_CONTROL_PLANE": two_nodes.address}
    served = run(
        case, case.implementation, tmp_path / "served", material, address | case.environment
    )
    planned = two_nodes.metric("distca_control_plane_plan_seconds_count") - before
    assert planned >= case.n_steps
    assert two_nodes.metric("distca_control_plane_jobs_closed_total", outcome="failed") == 0
    assert len(plain) == len(served) == 2
    for mine, theirs in zip(served, plain, strict=True):
        assert len(theirs) >= 3
        assert mine == pytest.approx(theirs, rel=CLOSE, abs=CLOSE)


_TWO_MODELS = """
import sys
from transformers import AutoModelForCausalLM
def loaded(implementation):
    AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation=implementation)
    return "trainer_client.attach" in sys.modules
assert (loaded("sdpa"), loaded("eager"), loaded("distca")) == (False, False, True)
"""


def test_models_that_ask_for_other_attention_load_nothing(material: Path) -> None:
    subprocess.run([sys.executable, "-c", _TWO_MODELS, material / "model"], check=True, timeout=200)


def run(
    case: Case, implementation: str, folder: Path, material: Path, environment: dict[str, str]
) -> list[list[float]]:
    """Losses, and what else was logged, of both ranks."""
    filled = {"model": str(material / "model"), "data": str(material)}
    arguments = [each.format(implementation=implementation, **filled) for each in case.command]
    ended = ran(
        *torchrun(2, *arguments),
        cwd=folder,
        env={
            **home(folder / "home", NODE_SHAPE),
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            # DeepSpeed compiles for two minutes, once.
            "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix, "torch_extensions")),
            **environment,
        },
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    state = folder / "out" / "checkpoint-3" / "trainer_state.json"
    if state.exists():
        log: list[dict[str, Any]] = json.loads(state.read_text())["log_history"]
        return [[entry[name] for entry in log for name in _LOGGED if name in entry]] * 2
    return [json.loads((folder / f"losses-{rank}.json").read_text()) for rank in range(2)]
