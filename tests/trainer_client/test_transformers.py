"""Real transformers models with ``attn_implementation="distca"``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from core_attention.manifest import RankManifest
from core_attention.shape import AttentionShape
from tests.cluster import Cluster, keep_profile
from trainer_client import PingPong, Placement, Session, SessionError, SessionOptions
from trainer_client.transformers import UnsupportedArgument

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "use_cache": False,
}
SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=16, head_dim_v=16, dtype="float32")
LENGTHS = ([40, 1, 90], [77, 2, 5])


def open_session(
    cluster: Cluster, job: str, *, shape: AttentionShape = SHAPE, **options: Any
) -> Session:
    """A job of one rank, whose servers are the cluster's and the rank's own."""
    keep_profile(cluster.folder, shape, options.get("device", "cpu"))
    settings: dict[str, Any] = {
        "placement": Placement.MIXED,
        "data_host": "127.0.0.1",
        "one_host": True,
        "profile_dir": cluster.folder,
        "probe_bytes": 0,
        **options,
    }
    return Session.open(
        SessionOptions(
            control_plane=cluster.address,
            job=job,
            rank=0,
            n_ranks=1,
            n_layers=2,
            shape=shape,
            **settings,
        )
    )


@pytest.fixture(scope="module")
def session(pool_of_four: Cluster) -> Iterator[Session]:
    with open_session(pool_of_four, "transformers", planner="random") as opened:
        yield opened


_step = iter(range(1000))


def submit(session: Session, nano_batches: tuple[list[int], ...] = LENGTHS) -> int:
    step = next(_step)
    session.submit(RankManifest.from_lengths(step, 0, nano_batches))
    return step


def make_batches(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for lengths in LENGTHS:
        ids = torch.randint(0, 64, (1, sum(lengths)), generator=generator)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
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


@pytest.mark.parametrize("name", CONFIGS)
def test_a_real_model_trains_as_with_local_attention(session: Session, name: str) -> None:
    model = make_model(copy.deepcopy(CONFIGS[name]), "distca")
    local = make_model(copy.deepcopy(CONFIGS[name]), "sdpa")
    local.load_state_dict(model.state_dict())
    batches = make_batches()
    with session.step(submit(session)):
        loss = sum(output.loss for output in PingPong(model)(batches))
        loss.backward()
    expected = sum(local(**batch).loss for batch in batches)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for (parameter_name, parameter), other in zip(
        model.named_parameters(), local.parameters(), strict=True
    ):
        assert parameter.grad is not None
        assert other.grad is not None
        difference = (parameter.grad - other.grad).abs().max() / other.grad.abs().max()
        # float32 through two layers: a few hundred roundings of 6e-8.
        assert difference < 2e-5, f"{parameter_name} differs by {difference:.1e}"


def test_documents_are_kept_apart(session: Session) -> None:
    """What a later document holds changes nothing in an earlier one, nor the other way round."""
    model = make_model(CONFIGS["Llama"], "distca")
    outputs = []
    for last in (3, 9):
        batches = make_batches()
        batches[0]["input_ids"][0, 41:] = last
        with session.step(submit(session)), torch.no_grad():
            outputs.append(PingPong(model)(batches)[0].logits)
    assert torch.equal(outputs[0][0, :41], outputs[1][0, :41])
    assert not torch.equal(outputs[0][0, 41:], outputs[1][0, 41:])


def test_cu_seq_lens_are_accepted(session: Session) -> None:
    model = make_model(CONFIGS["Llama"], "distca")
    batches = make_batches()
    for batch, lengths in zip(batches, LENGTHS, strict=True):
        cumulative = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        batch |= {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative}
    with session.step(submit(session)):
        sum(output.loss for output in PingPong(model)(batches)).backward()


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (transformers.MistralConfig(**SIZES, sliding_window=32), "sliding_window"),
        (
            transformers.Qwen3Config(
                **SIZES, use_sliding_window=True, sliding_window=32, max_window_layers=0
            ),
            "sliding_window",
        ),
        (transformers.Gemma2Config(**SIZES, sliding_window=32), "softcap"),
        (
            transformers.GptOssConfig(
                **SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=32
            ),
            "s_aux",
        ),
        (transformers.LlamaConfig(**SIZES, attention_dropout=0.1), "dropout"),
    ],
    ids=["Mistral-window", "Qwen3-window", "Gemma2", "gpt-oss", "dropout"],
)
def test_an_unsupported_feature_is_refused_by_name(
    session: Session, config: transformers.PreTrainedConfig, named: str
) -> None:
    model = make_model(config, "distca").train()
    with (
        pytest.raises(UnsupportedArgument, match=f"does not support.*{named}"),
        session.step(submit(session)),
    ):
        PingPong(model)(make_batches())


def test_padding_is_refused(session: Session) -> None:
    model = make_model(CONFIGS["Llama"], "distca")
    batches = make_batches()
    mask = torch.ones_like(batches[0]["input_ids"])
    mask[0, -3:] = 0
    batches[0]["attention_mask"] = mask
    with pytest.raises(UnsupportedArgument, match="padding"), session.step(submit(session)):
        PingPong(model)(batches)


def test_other_documents_than_planned_are_refused(session: Session) -> None:
    model = make_model(CONFIGS["Llama"], "distca")
    batches = make_batches()
    batches[0]["position_ids"] = torch.arange(131)[None]
    with pytest.raises(ValueError, match="at row 40"), session.step(submit(session)):
        PingPong(model)(batches)


def test_a_batch_of_several_rows_is_refused(session: Session) -> None:
    model = make_model(CONFIGS["Llama"], "distca")
    batches = make_batches()
    batches[0] = {name: value.expand(2, -1) for name, value in batches[0].items()}
    with pytest.raises(ValueError, match=r"one row|batch of 2"), session.step(submit(session)):
        PingPong(model)(batches)


def test_a_model_outside_of_a_step_is_refused() -> None:
    model = make_model(CONFIGS["Llama"], "distca")
    with pytest.raises(SessionError, match="no step is running"):
        model(**make_batches()[0])


def test_a_step_that_never_calls_core_attention_is_refused(session: Session) -> None:
    local = make_model(CONFIGS["Llama"], "sdpa")
    with (
        pytest.raises(SessionError, match=r"not once.*attn_implementation='distca'"),
        session.step(submit(session)),
    ):
        PingPong(local)(make_batches())


def test_more_layers_than_the_job_has_are_refused(session: Session) -> None:
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 3})
    with (
        pytest.raises(SessionError, match="n_layers=2"),
        session.step(submit(session)),
    ):
        PingPong(make_model(config, "distca"))(make_batches())


def test_training_goes_on_after_a_step_that_was_given_up(session: Session) -> None:
    model = make_model(CONFIGS["Llama"], "distca")
    with session.step(submit(session)) as running:
        PingPong(model)(make_batches())
        running.give_up("the loss is not finite")
    with session.step(submit(session)):
        sum(output.loss for output in PingPong(model)(make_batches())).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
