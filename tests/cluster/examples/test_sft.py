"""``examples.sft`` trains checkpoints of several classes as it does without DistCA."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests import ROOT
from tests.cluster.others.material import tokenizer, words
from tests.support.cluster import NODE_SHAPE, Cluster, cluster, home, torchrun
from tests.support.programs import ran
from tests.support.tiny_models import TINY_LLAMA

pytestmark = pytest.mark.timeout(400)

CLOSE = 1e-5
"""Some hundred roundings of float32 in four steps of SGD."""

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("sdpa", {}),
    "qwen3_moe": ("sdpa", EXPERTS),
    # Windows shorter than documents; a row of experts' weights is two blocks of 32.
    "gpt_oss": ("eager", {"intermediate_size": 64, "num_local_experts": 4, "sliding_window": 6}),
}
"""By model type: the attention to compare with, and fields of the config."""

PADDED = ["--packing=False", "--per_device_train_batch_size=4"]
"""Documents of gpt-oss see each other in packed rows with transformers' eager attention."""

OPTIONS = [
    *("--max_length=64", "--use_cpu", "--bf16=False", "--max_steps=4", "--warmup_steps=0"),
    *("--optim=sgd", "--learning_rate=0.1", "--disable_tqdm=True"),
]

RANK = """
import json, os, sys
import torch
from examples.sft.__main__ import train
trainer = train(sys.argv[1:])
trainer.model.eval()
with torch.no_grad():
    logits = trainer.model(input_ids=torch.arange(4, 60)[None]).logits
if os.environ["RANK"] == "0":
    torch.save((trainer.state.log_history, logits), "seen")
trainer.end()
"""
"""Keeps the log, and what the trained model makes of a document."""


@pytest.fixture(scope="module")
def in_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("sft"), 0) as running:
        yield running


@pytest.mark.parametrize("model_type", MODELS)
def test_a_checkpoint_is_trained_and_saved(
    model_type: str, tmp_path: Path, in_place: Cluster
) -> None:
    attention, fields = MODELS[model_type]
    write_checkpoint(tmp_path / "model", model_type, fields)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 60, (64,), generator=generator).tolist()
    rows = [json.dumps({"text": words(length, generator)}) + "\n" for length in lengths]
    (tmp_path / "documents.jsonl").write_text("".join(rows))
    before = in_place.metric("distca_control_plane_plan_seconds_count")
    rows_of_batch = PADDED if model_type == "gpt_oss" else []
    served, logits = trained(tmp_path, "distca", in_place.address, *rows_of_batch)
    assert in_place.metric("distca_control_plane_plan_seconds_count") - before >= 4
    plain, _ = trained(tmp_path, attention, "", *rows_of_batch)
    assert len(plain) == 8
    assert served == pytest.approx(plain, rel=CLOSE, abs=CLOSE)
    auto: Any = AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path / "distca", attn_implementation=attention)
    assert loaded.config.model_type == model_type
    with torch.no_grad():
        assert torch.allclose(loaded(torch.arange(4, 60)[None]).logits, logits, CLOSE, CLOSE)
    auto = AutoTokenizer
    assert auto.from_pretrained(tmp_path / "distca")("t7 t9").input_ids == [7, 9]


def write_checkpoint(folder: Path, model_type: str, fields: dict[str, Any]) -> None:
    """Random weights; those of gpt-oss with its experts in four bits, as it is published."""
    torch.manual_seed(0)
    sizes = {**TINY_LLAMA, "use_cache": True, "max_position_embeddings": 512, **fields}
    config = AutoConfig.for_model(model_type, **sizes, eos_token_id=1, pad_token_id=0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if model_type != "gpt_oss":
        return
    weights = model.state_dict()
    for name in [each for each in weights if each.endswith(("gate_up_proj", "down_proj"))]:
        n_experts, width_in, width_out = weights.pop(name).shape
        blocks = (n_experts, width_out, width_in // 32)
        weights[f"{name}_blocks"] = torch.randint(256, (*blocks, 16), dtype=torch.uint8)
        # Powers of two: of 2**-6.
        weights[f"{name}_scales"] = torch.full(blocks, 127 - 6, dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    stored = json.loads((folder / "config.json").read_text())
    stored["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(stored))


def trained(
    folder: Path, attention: str, control_plane: str, *options: str
) -> tuple[list[float], torch.Tensor]:
    """Losses and norms of gradients, and logits of the first rank."""
    (folder / "rank.py").write_text(RANK)
    given = [f"--model={folder}/model", f"--data={folder}/documents.jsonl"]
    given += [f"--output={folder / attention}", f"--attention={attention}", *OPTIONS, *options]
    ended = ran(
        *torchrun(2, "rank.py", "--config", f"{ROOT}/examples/sft/recipe.yaml", *given),
        cwd=folder,
        env={
            **home(folder, NODE_SHAPE),
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "DISTCA_CONTROL_PLANE": control_plane,
            "DISTCA_PLACEMENT": "in-place",
            "DISTCA_DATA_HOST": "127.0.0.1",
        },
        timeout=180,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    log, logits = torch.load(folder / "seen", weights_only=False)
    return [each[name] for each in log for name in ("loss", "grad_norm") if name in each], logits
