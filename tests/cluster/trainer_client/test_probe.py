"""``SessionOptions.for_model`` finds a model's core attention, and changes nothing in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import trainer_client.models.transformers
from core_attention.errors import TensorError
from tests.support.process_groups import process_group
from trainer_client import (
    AttentionShape,
    PingPong,
    SessionError,
    SessionOptions,
    core_attention,
)
from trainer_client.models.probe import CallKind

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
JOB: dict[str, Any] = {"control_plane": "127.0.0.1:7700", "job": "probe", "rank": 0, "n_ranks": 1}
SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=16, head_dim_v=16, dtype="float32")


def make_model(config: transformers.PreTrainedConfig, **options: Any) -> Any:
    assert trainer_client.models.transformers.IMPLEMENTATION == "distca"
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_config(config, attn_implementation="distca", **options)


def llama(**options: Any) -> Any:
    return make_model(transformers.LlamaConfig(**SIZES), **options)


@pytest.mark.parametrize(
    ("config", "n_layers", "shape", "scale"),
    [
        (transformers.LlamaConfig(**SIZES), 3, SHAPE, 0.25),
        (
            transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"]),
            1,
            SHAPE,
            0.25,
        ),
        (transformers.GraniteConfig(**SIZES, attention_multiplier=0.3), 3, SHAPE, 0.3),
        (
            transformers.DeepseekV3Config(
                **{**SIZES, "num_key_value_heads": 4},
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=16,
                v_head_dim=12,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                moe_intermediate_size=32,
            ),
            3,
            AttentionShape(
                num_heads=4, num_heads_kv=4, head_dim=24, head_dim_v=12, dtype="float32"
            ),
            24**-0.5,
        ),
    ],
    ids=["plain", "hybrid", "scale", "latent-attention"],
)
def test_shape_calls_and_scale_are_found(
    config: transformers.PreTrainedConfig, n_layers: int, shape: AttentionShape, scale: float
) -> None:
    options = SessionOptions.for_model(make_model(config), **JOB)
    assert (options.n_layers, options.shape, options.device) == (n_layers, shape, "cpu")
    assert options.softmax_scale == pytest.approx(scale)


class Restless(nn.Module):
    """Draws random numbers and writes to its buffers, one in place and one anew."""

    counted: torch.Tensor
    cached: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 3 * 64)
        self.register_buffer("counted", torch.zeros(1))
        self.register_buffer("cached", torch.zeros(1), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.counted += 1
        self.register_buffer("cached", torch.ones(2), persistent=False)
        hidden = nn.functional.dropout(hidden, 0.5)
        q, k, v = (part.reshape(-1, 4, 16) for part in self.project(hidden).chunk(3, -1))
        return core_attention(q.contiguous(), k.contiguous(), v.contiguous())


def test_what_was_counted_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = make_model(
        transformers.Qwen2Config(**SIZES, layer_types=kinds, use_sliding_window=True)
    )
    with caplog.at_level("INFO", logger="trainer_client.models.probe"):
        options = SessionOptions.for_model(model, **JOB)
    (record,) = (each for each in caplog.records if each.name.endswith("probe"))
    assert isinstance(record.args, tuple)
    assert record.args[:3] == ("Qwen2ForCausalLM", 1, 2)
    kind = record.args[3]
    assert isinstance(kind, CallKind)
    assert kind.shape == options.shape
    assert "without gradients" in record.message


def test_the_model_is_left_as_it_was() -> None:
    model = Restless().train()
    model.project.eval()
    cached, seed = model.cached, torch.get_rng_state()
    options = SessionOptions.for_model(model, inputs={"hidden": torch.ones(5, 16)}, **JOB)
    assert options.shape.num_heads == 4
    assert torch.equal(torch.get_rng_state(), seed)
    assert model.counted.item() == 0
    assert model.cached is cached
    assert (model.training, model.project.training) == (True, False)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_generators_of_a_gpu_are_left_as_they_were() -> None:
    model = Restless().cuda()
    seed = torch.cuda.get_rng_state()
    options = SessionOptions.for_model(model, inputs={"hidden": torch.ones(5, 16)}, **JOB)
    assert options.device == f"cuda:{torch.cuda.current_device()}"
    assert torch.equal(torch.cuda.get_rng_state(), seed)


def test_autocast_of_the_caller_decides_the_dtype() -> None:
    model = Restless()
    hidden = torch.ones(5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        options = SessionOptions.for_model(model, inputs={"hidden": hidden}, **JOB)
        # Weights that the probe had cast, and autocast kept, would have no gradient.
        model.project(hidden).sum().backward()
    assert options.shape.dtype == "bfloat16"
    assert model.project.weight.grad is not None


def test_a_model_in_half_precision_is_found_as_such() -> None:
    options = SessionOptions.for_model(llama(dtype=torch.bfloat16), **JOB)
    assert options.shape.dtype == "bfloat16"


class Adapter(nn.Module):
    """Around a model of transformers, as adapters are: any arguments, the model's config."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model, self.config = model, model.config

    def forward(self, **arguments: Any) -> Any:
        return self.base_model(**arguments)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    with process_group(tmp_path):
        yield


@pytest.mark.usefixtures("alone")
def test_wrappers_are_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a collective runs, nor anything is compiled."""

    def unwanted(*_: Any, **__: Any) -> Any:
        raise AssertionError("the probe ran a wrapper")

    model = llama()
    for layer in model.model.layers:
        layer.compile(backend=unwanted)
    wrapped = DistributedDataParallel(PingPong(Adapter(torch.compile(model, backend=unwanted))))
    monkeypatch.setattr(DistributedDataParallel, "forward", unwanted)
    assert SessionOptions.for_model(wrapped, **JOB).n_layers == 3


class Uneven(nn.Module):
    """Two blocks that attend; the second with heads twice as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(16), Block(32)

    def forward(self, rows: int) -> None:
        for block in (self.first, self.second):
            block(rows)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, rows: int) -> torch.Tensor:
        return core_attention(*(torch.ones(rows, 2, self.width) for _ in range(3)))


def sharded() -> nn.Module:
    model: nn.Module = llama()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = llama()
    return model


def of_other_scales() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = transformers.GPT2Config(**sizes, attn_pdrop=0.0, scale_attn_by_inverse_layer_idx=True)
    model: nn.Module = make_model(config)
    return model


class Batched(nn.Module):
    """Has rows with a batch."""

    def forward(self, rows: int) -> torch.Tensor:
        return core_attention(*(torch.ones(1, rows, 2, 16) for _ in range(3)))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (sharded, "fully_shard"),
        (
            lambda: FullyShardedDataParallel(llama(), device_id=torch.device("cpu")),
            "FullyShardedDataParallel",
        ),
        (on_meta, "embed_tokens.weight"),
        (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), "distca"),
        (of_other_scales, r"h\.0\.attn: .*=0\.25 .*h\.1\.attn: .*=0\.125 "),
    ],
)
def test_models_that_cannot_be_probed_are_refused(
    make: Callable[[], nn.Module], named: str
) -> None:
    with pytest.raises(SessionError, match=named):
        SessionOptions.for_model(make(), **JOB)


def test_calls_of_a_model_of_ones_own_are_refused_with_their_places() -> None:
    with pytest.raises(SessionError, match=r"first: .*head_dim=16.*; second: .*head_dim=32"):
        SessionOptions.for_model(Uneven(), inputs={"rows": 3}, **JOB)
    with pytest.raises(TensorError):
        SessionOptions.for_model(Batched(), inputs={"rows": 3}, **JOB)
    with pytest.raises(ValueError, match="inputs="):
        SessionOptions.for_model(Restless(), **JOB)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n_layers": 2}, "n_layers is 2.*3"),
        ({"shape": AttentionShape(**{**vars(SHAPE), "dtype": "bfloat16"})}, "shape"),
        ({"softmax_scale": 0.5}, r"softmax_scale is 0\.5.*0\.25"),
        ({"device": "cuda:3"}, "device is cuda:3.*cpu"),
    ],
)
def test_options_that_contradict_the_model_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SessionOptions.for_model(llama(), **JOB, **given)


def test_options_that_agree_with_the_model_are_kept() -> None:
    options = SessionOptions.for_model(
        llama(), **JOB, n_layers=3, softmax_scale=0.25, device="cpu", n_nano_batches=1
    )
    assert (options.n_layers, options.n_nano_batches) == (3, 1)


def test_the_scale_is_the_users_where_the_model_does_not_say() -> None:
    inputs = {"hidden": torch.ones(5, 16)}
    options = SessionOptions.for_model(Restless(), inputs=inputs, softmax_scale=0.5, **JOB)
    assert options.softmax_scale == 0.5
