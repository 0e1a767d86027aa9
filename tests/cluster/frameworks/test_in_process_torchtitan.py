"""What torchtitan is refused for, before anything is built; batches cut in two and read ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from tests.cluster.frameworks.cpu_devices import torchtitan_on_cpu

torchtitan_on_cpu()

from torchtitan.models.common.attention import VarlenAttention  # noqa: E402
from torchtitan.models.gpt_oss import model_registry as gpt_oss  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402

from core_attention.score_rule import ScoreRule  # noqa: E402
from examples.torchtitan.llama3 import debugmodel  # noqa: E402
from tests.support.errors import refused  # noqa: E402
from tests.support.reference import packed_attention  # noqa: E402
from trainer_client.errors import SessionError  # noqa: E402
from trainer_client.frameworks.torchtitan import (  # noqa: E402
    served,
    served_varlen,
)
from trainer_client.frameworks.torchtitan.cutting import (  # noqa: E402
    padded,
    padded_positions,
    why_documents_stay_whole,
)
from trainer_client.frameworks.torchtitan.lanes import CutBatch, SubmittedBatch  # noqa: E402
from trainer_client.frameworks.torchtitan.refusals import pipeline_problems  # noqa: E402
from trainer_client.frameworks.versions import UnsupportedSetting  # noqa: E402
from trainer_client.turns.parts import RowPart  # noqa: E402


def compiled(config: Any) -> None:
    config.compile.enable = True


def with_graphs(config: Any) -> None:
    config.training.disable_cuda_graphs = False


def with_context_parallelism(config: Any) -> None:
    config.parallelism.context_parallel_degree = 2


def without_override(config: Any) -> None:
    config.override.imports = []


def with_flex(config: Any) -> None:
    config.model_spec = model_registry("debugmodel", attn_backend="flex")


def with_windows_alone(config: Any) -> None:
    config.model_spec = gpt_oss("debugmodel")
    config.model_spec.model.layers = config.model_spec.model.layers[:1]


def with_another_window(config: Any) -> None:
    config.model_spec = gpt_oss("debugmodel")
    config.model_spec.model.layers[2].attention.sliding_window_size = 64


@pytest.mark.parametrize(
    "change",
    [
        compiled,
        with_graphs,
        with_context_parallelism,
        without_override,
        with_flex,
        with_windows_alone,
        with_another_window,
    ],
)
def test_what_cannot_work_is_refused(change: Callable[[Any], None]) -> None:
    config = debugmodel()
    change(config)
    with pytest.raises(UnsupportedSetting):
        config.build()


def test_pipelines_are_refused_where_torch_does_not_take_microbatches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PipelineScheduleSingle, "step", lambda self, *args, target=None: None)
    config = debugmodel()
    config.parallelism.pipeline_parallel_degree = 2
    with pytest.raises(UnsupportedSetting):
        config.build()
    monkeypatch.setattr(PipelineScheduleSingle, "step", lambda self, *args, arg_mbs=None: None)
    assert not list(pipeline_problems(2))


@pytest.mark.parametrize("window", [None, 3])
def test_validation_outside_of_a_step_is_computed_at_home(window: int | None) -> None:
    size = (-1 if window is None else window - 1, 0)
    layer = served_varlen(VarlenAttention.Config(window_size=size)).build()
    lengths = [1, 7, 0, 1, 3]
    q, k = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8)
    v = torch.randn(2, 6, 2, 16)
    masks = SimpleNamespace(cu_seq_q=torch.tensor([0, *lengths]).cumsum(0).int())
    with torch.no_grad():
        o = layer(
            q,
            k,
            v,
            attention_masks=masks,
            scale=0.5,
            out_transform=lambda o, lse: o * lse[..., None],
        )
        with pytest.raises(SessionError):
            layer(q, k, v, attention_masks=None)
    q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    right, sums = packed_attention(
        q, k, v, [each for each in lengths if each], 0.5, ScoreRule(window=window)
    )
    # A float32 sum of at most 7 terms.
    torch.testing.assert_close(
        o.flatten(0, 1).double(), right * sums[..., None], rtol=1e-5, atol=1e-6
    )


def test_a_configuration_of_another_trainer_is_refused() -> None:
    with pytest.raises(UnsupportedSetting):
        served(debugmodel())


def test_bidirectional_attention_is_refused() -> None:
    with pytest.raises(UnsupportedSetting):
        served_varlen(VarlenAttention.Config(window_size=(-1, -1))).build()


def test_the_override_alone_says_that_the_trainer_is_missing() -> None:
    layer = served_varlen(VarlenAttention.Config()).build()
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(SessionError):
        layer(q, q, q, attention_masks=None)


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]])


def test_models_whose_rows_look_at_their_neighbours_keep_documents_whole() -> None:
    def decoder(**more: Any) -> Any:
        model = torch.nn.Module()
        block = torch.nn.Module()
        block.attention = torch.nn.ModuleList([served_varlen(VarlenAttention.Config()).build()])
        model.layers = torch.nn.ModuleDict({"0": block, **more.pop("layers", {})})
        for name, module in more.items():
            setattr(model, name, module)
        return model

    linear, conv = torch.nn.Linear(2, 2), torch.nn.Conv1d(2, 2, 3)
    assert why_documents_stay_whole(decoder()) is None
    assert why_documents_stay_whole(decoder(mtp_layers=None)) is None
    for model in (
        decoder(mtp_layers=torch.nn.ModuleList([linear])),
        decoder(layers={"3": linear}),
        decoder(short=conv),
    ):
        assert why_documents_stay_whole(model)


def test_padding_is_a_document_of_its_own() -> None:
    part = RowPart(3, 5, 2)
    assert padded_positions(POSITIONS, part).tolist() == [[0, 1, 0, 1]]
    assert padded(torch.arange(5, 21).view(2, 8), part).tolist() == [[8, 9, 0, 0]]
    hidden = padded(torch.arange(32.0).view(2, 8, 2), part)
    assert hidden.tolist() == [[[6.0, 7.0], [8.0, 9.0], [0.0, 0.0], [0.0, 0.0]]]


class Running:
    """A step with one nano-batch of three documents."""

    step = 4

    def segments(self, nano_batch: int) -> list[tuple[int, int, int]]:
        return {1: [(0, 0, 3), (3, 0, 2), (5, 0, 1)]}[nano_batch]

    def check_at_end(self, check: Callable[[], None]) -> None:
        check()


def test_positions_that_were_not_submitted_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running()
    monkeypatch.setattr("trainer_client.frameworks.torchtitan.lanes.require_step", lambda: running)
    submitted = POSITIONS[:1, :6]
    batch = CutBatch(
        SimpleNamespace(get_attention_masks=lambda positions: positions),
        SubmittedBatch(submitted, [RowPart(0, 6)], first=1),
    )
    changed = submitted.clone()
    changed[0, 3] = 7
    (((tokens,), named),) = batch.calls((submitted,), {"positions": submitted})
    assert tokens.equal(submitted)
    assert named["positions"].equal(submitted)
    with refused():
        batch.calls((submitted,), {"positions": changed})
    with refused():
        batch.calls((submitted,), {"positions": submitted[:, :5]})


def test_either_layout_is_taken() -> None:
    """0.3.0 hands over ``[B, L, N, H]``; what comes after it, ``[T, N, H]``."""
    from trainer_client.frameworks.torchtitan.attention import SeenCalls

    layer = served_varlen(replace(VarlenAttention.Config())).build()
    for shape in ((2, 4), (8,)):
        q, k = torch.zeros(*shape, 4, 8), torch.zeros(*shape, 2, 8)
        seen = SeenCalls()
        with seen.recording():
            assert layer(q, k, k, attention_masks=None, scale=0.5).shape == q.shape
        (call,) = seen.served
        assert (call.shape.num_heads_kv, call.scale) == (2, 0.5)
