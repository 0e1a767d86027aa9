"""Real transformers models with ``attn_implementation="distca"``."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as checkpoints
import transformers
from torch import nn

from core_attention.host_copies import HostCopy
from core_attention.manifest import RankManifest
from core_attention.shape import AttentionShape
from tests.support.cluster import Cluster, keep_profile, on_this_host
from tests.support.errors import refused
from tests.support.loops import PingPong
from tests.support.tiny_models import TINY_LLAMA
from trainer_client import Placement, Session, SessionError, SessionOptions
from trainer_client.models import documents
from trainer_client.models.transformers import UnsupportedModel

SIZES: dict[str, Any] = {**TINY_LLAMA, "max_position_embeddings": 512}
SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=16, head_dim_v=16, dtype="float32")
LENGTHS = ([40, 1, 90], [77, 2, 5])


def open_session(
    cluster: Cluster, job: str, *, shape: AttentionShape = SHAPE, **options: Any
) -> Session:
    """A job of one rank, whose servers are the cluster's and the rank's own."""
    keep_profile(cluster.folder, shape, options.get("device", "cpu"))
    settings: dict[str, Any] = {
        "placement": Placement.MIXED,
        **on_this_host(cluster.folder),
        "n_layers": 2,
        **options,
    }
    return Session.open(
        SessionOptions(
            control_plane=cluster.address,
            job=job,
            rank=0,
            n_ranks=1,
            shape=shape,
            **settings,
        )
    )


@pytest.fixture(scope="module")
def session(pool_of_four: Cluster) -> Iterator[Session]:
    with open_session(pool_of_four, "transformers", planner="random") as opened:
        yield opened


@pytest.fixture(scope="module")
def session_of_four_kv_heads(pool_of_four: Cluster) -> Iterator[Session]:
    """For models without grouped queries."""
    shape = dataclasses.replace(SHAPE, num_heads_kv=4)
    with open_session(
        pool_of_four, "transformers-4", shape=shape, placement=Placement.IN_PLACE
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def bfloat16_session(pool_of_four: Cluster) -> Iterator[Session]:
    shape = dataclasses.replace(SHAPE, dtype="bfloat16")
    with open_session(
        pool_of_four, "transformers-bf16", shape=shape, placement=Placement.IN_PLACE
    ) as opened:
        yield opened


_step = iter(range(1000))


def submit(session: Session, nano_batches: tuple[list[int], ...] = LENGTHS) -> int:
    step = next(_step)
    session.submit(RankManifest.from_lengths(step, 0, nano_batches))
    return step


def make_batches(
    seed: int = 0, lengths: tuple[list[int], ...] = LENGTHS
) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for of_batch in lengths:
        ids = torch.randint(0, 64, (1, sum(of_batch)), generator=generator)
        positions = torch.cat([torch.arange(length) for length in of_batch])[None]
        batches.append({"input_ids": ids, "position_ids": positions, "labels": ids})
    return batches


def make_model(config: transformers.PreTrainedConfig, implementation: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation=implementation
    )
    return model


CONFIGS = {
    "Llama": transformers.LlamaConfig(**SIZES),
    "Qwen3": transformers.Qwen3Config(**SIZES),
    "Mistral": transformers.MistralConfig(**SIZES, sliding_window=None),
}


def documents_in(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Each packed document as a batch of its own."""
    begins = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    ends = [*begins[1:], batch["position_ids"].shape[1]]
    return [
        {name: batch[name][:, begin:end] for name in ("input_ids", "position_ids")}
        for begin, end in zip(begins, ends, strict=True)
    ]


def document_losses(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of each next token of the same document, summed."""
    last = (batch["position_ids"][0, 1:] == 0).tolist()
    kept = torch.tensor([index for index, ends in enumerate(last) if not ends], dtype=torch.int64)
    targets = batch["input_ids"][0, 1:][kept]
    loss = nn.functional.cross_entropy(logits[0, :-1][kept].float(), targets, reduction="sum")
    return loss / 100


def with_everything(batches: list[dict[str, torch.Tensor]]) -> None:
    """Whatever else collators hand over of the documents."""
    for batch, lengths in zip(batches, LENGTHS, strict=True):
        cumulative = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        batch |= {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative}
        batch["seq_idx"] = index[None].int()


def padded(batches: list[dict[str, torch.Tensor]]) -> None:
    batches[0]["attention_mask"] = torch.ones_like(batches[0]["input_ids"])
    batches[0]["attention_mask"][0, -3:] = 0


def of_one_document(batches: list[dict[str, torch.Tensor]]) -> None:
    batches[0]["position_ids"] = torch.arange(131)[None]


def of_documents_by_twos(batches: list[dict[str, torch.Tensor]]) -> None:
    with_everything(batches)
    batches[0]["seq_idx"] //= 2


def of_two_rows(batches: list[dict[str, torch.Tensor]]) -> None:
    batches[0] = {name: value.expand(2, -1) for name, value in batches[0].items()}


@pytest.mark.parametrize("change", [padded, of_one_document, of_documents_by_twos, of_two_rows])
def test_batches_that_do_not_fit_are_refused(
    session: Session, change: Callable[[list[dict[str, torch.Tensor]]], None]
) -> None:
    model, batches = make_model(CONFIGS["Llama"], "distca"), make_batches()
    change(batches)
    with refused(), session.step(submit(session)):
        PingPong(model)(batches)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (transformers.MistralConfig(**SIZES, sliding_window=32), SessionError),
        (
            transformers.Gemma2Config(**SIZES, sliding_window=32, query_pre_attn_scalar=16),
            SessionError,
        ),
        (transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 3}), SessionError),
    ],
    ids=["window", "softcap", "layers"],
)
def test_models_that_do_not_fit_the_session_are_refused(
    session: Session, config: transformers.PreTrainedConfig, error: type[Exception]
) -> None:
    model = make_model(config, "distca").train()
    with pytest.raises(error), session.step(submit(session)):
        PingPong(model)(make_batches())


@pytest.mark.parametrize("arrives", ["in the second layer", "at the end"])
def test_other_documents_are_refused_once_their_positions_have_come_from_the_device(
    session: Session, monkeypatch: pytest.MonkeyPatch, arrives: str
) -> None:
    looks = 0

    class OnItsWay(HostCopy):
        @property
        def is_done(self) -> bool:
            nonlocal looks
            looks += 1
            return arrives == "in the second layer" and looks > 2

    monkeypatch.setattr(documents, "HostCopy", OnItsWay)
    model, batches = make_model(CONFIGS["Llama"], "distca"), make_batches()
    batches[0]["position_ids"] = torch.arange(131)[None]

    def train() -> None:
        with session.step(submit(session)):
            losses = [output.loss for output in PingPong(model)(batches)]
            assert arrives == "at the end"
            torch.stack(losses).sum().backward()

    with refused():
        train()
    assert looks > 2


ONE_EACH = ([40], [77])
"""One document in a nano-batch."""

GPT: dict[str, Any] = {
    "vocab_size": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


@pytest.mark.parametrize("wrong", [True, False])
def test_positions_are_compared_where_the_model_hands_none_on(
    session_of_four_kv_heads: Session, *, wrong: bool
) -> None:
    """GPT-BigCode gives its attention no position_ids."""
    model = make_model(transformers.GPTBigCodeConfig(**GPT, multi_query=False), "distca")
    session, batches = session_of_four_kv_heads, make_batches()
    for batch in batches:
        positions = batch.pop("position_ids")
        if wrong:
            batch["position_ids"] = torch.arange(positions.shape[1])[None]
    with refused(), session.step(submit(session)):
        PingPong(model)(batches)


def test_one_document_needs_no_position_ids_where_the_model_hands_its_own_on(
    session: Session,
) -> None:
    model = make_model(CONFIGS["Llama"], "distca")
    batches = make_batches(lengths=ONE_EACH)
    for batch in batches:
        del batch["position_ids"]
    with session.step(submit(session, ONE_EACH)):
        sum(output.loss for output in PingPong(model)(batches)).backward()


def test_keys_that_a_cache_brings_are_refused(session: Session) -> None:
    """A checkpoint of one's own runs a layer again, which enters its keys once more."""
    model: Any = make_model(CONFIGS["Llama"], "distca")
    for layer in model.model.layers:
        layer.forward = functools.partial(
            checkpoints.checkpoint, layer.forward, use_reentrant=False
        )
    batches = [{**batch, "use_cache": True} for batch in make_batches()]
    with pytest.raises(UnsupportedModel), session.step(submit(session)):
        sum(output.loss for output in PingPong(model)(batches)).backward()


def test_a_model_that_cannot_be_checked_by_itself_is_refused(session: Session) -> None:
    model = make_model(CONFIGS["Llama"], "distca")
    # As DeepSpeed's ZeRO-3 marks the weights that it has spread over ranks.
    next(model.parameters()).ds_id = 0  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedModel), session.step(submit(session)):
        PingPong(model, interleave=False)(make_batches())


def test_a_session_of_another_dtype_than_autocast_is_refused(session: Session) -> None:
    model = make_model(copy.deepcopy(CONFIGS["Qwen3"]), "distca")
    with (
        refused(),
        session.step(submit(session)),
        torch.autocast("cpu", torch.bfloat16),
    ):
        PingPong(model)(make_batches())


def test_mixed_dtypes_without_autocast_are_refused(bfloat16_session: Session) -> None:
    session = bfloat16_session
    model = make_model(CONFIGS["Llama"], "distca").to(torch.bfloat16)
    for layer in model.get_submodule("model.layers").children():
        layer.get_submodule("self_attn.v_proj").float()
        layer.get_submodule("self_attn.v_proj").register_forward_pre_hook(
            lambda _, inputs: (inputs[0].float(),)
        )
    with refused(), session.step(submit(session)):
        PingPong(model)(make_batches())


MIXED = {
    "Gemma3": transformers.Gemma3TextConfig(
        **SIZES,
        sliding_window=32,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "Llama4": transformers.Llama4TextConfig(
        **SIZES,
        attention_chunk_size=32,
        num_local_experts=2,
        intermediate_size_mlp=96,
        no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"],
    ),
    "gpt-oss": transformers.GptOssConfig(
        **SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=32
    ),
}
"""One layer at home, one that is served."""


@pytest.fixture(scope="module")
def session_of_one_layer(pool_of_four: Cluster) -> Iterator[Session]:
    with open_session(pool_of_four, "transformers-1", planner="random", n_layers=1) as opened:
        yield opened


def test_a_layer_whose_mask_and_window_differ_is_refused(session_of_one_layer: Session) -> None:
    model = make_model(copy.deepcopy(MIXED["Gemma3"]), "distca")
    model.get_submodule("model.layers.0.self_attn").sliding_window = 31  # type: ignore[assignment]
    with (
        pytest.raises(UnsupportedModel),
        session_of_one_layer.step(submit(session_of_one_layer)),
    ):
        PingPong(model)(make_batches())
