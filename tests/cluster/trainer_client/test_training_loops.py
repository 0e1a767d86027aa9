"""Loops of other libraries around whole rows, and ways of training, beside local attention."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.cluster.trainer_client.test_at_home import compare_gradients, pair, pair_of
from tests.cluster.trainer_client.test_transformers import (
    CONFIGS,
    document_losses,
    documents_in,
    make_batches,
    make_model,
)
from tests.support.cluster import Cluster
from tests.support.loops import attached
from trainer_client import SessionError, labels_per_rank
from trainer_client.attach.call_rows import CallRows
from trainer_client.attach.decoder import decoder_of
from trainer_client.models.transformers import UnsupportedModel, check_documents
from trainer_client.turns.branches import RowDocuments


def by_fsdp1(layers: nn.ModuleList) -> None:
    layers[0] = FullyShardedDataParallel(layers[0], device_id=torch.device("cpu"))


def by_zero_3(layers: nn.ModuleList) -> None:
    for index, parameter in enumerate(layers[0].parameters()):
        untyped: Any = parameter
        untyped.ds_id = index


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("shard", [by_fsdp1, by_zero_3])
def test_layers_in_which_nano_batches_cannot_take_turns_are_refused(
    pool_of_four: Cluster, shard: Callable[[nn.ModuleList], None]
) -> None:
    model, _ = pair()
    (row,) = make_batches(lengths=([5, 9],))
    shard(model.model.layers)
    with attached(pool_of_four, model, shard.__name__, turns=2), pytest.raises(SessionError):
        model(**row)


def test_padded_rows_need_positions_that_begin_at_0(pool_of_four: Cluster) -> None:
    """Positions that the model would count itself are those that it trains with locally."""
    model, _ = pair_of(begins_behind_the_padding())
    (row,) = make_batches(lengths=([9],))
    mask = torch.ones_like(row["input_ids"])
    mask[0, 0] = 0
    with attached(pool_of_four, model, "roberta"), pytest.raises(UnsupportedModel):
        model(input_ids=row["input_ids"], attention_mask=mask)


def test_noise_in_outputs_does_not_tell_of_positions() -> None:
    model, _ = pair()
    model.model.layers[0].register_forward_hook(
        lambda _module, _given, output: output + 1e-3 * torch.randn_like(output)
    )
    found = check_documents(model)
    assert found.counts_from_zero
    assert not found.fault
    roberta, _ = pair_of(begins_behind_the_padding())
    assert not check_documents(roberta).counts_from_zero


def begins_behind_the_padding() -> transformers.PreTrainedConfig:
    """Of a model whose positions begin behind the padding token's id."""
    return transformers.RobertaConfig(
        vocab_size=CONFIGS["Llama"].vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        is_decoder=True,
    )


def test_several_models_in_one_module_are_not_split_inside() -> None:
    model, other = (make_model(copy.deepcopy(CONFIGS["Llama"]), "distca") for _ in range(2))
    both = torch.nn.ModuleList([model, other])
    with pytest.raises(UnsupportedModel):
        decoder_of(both)


class _InBlocks(torch.nn.Module):
    """Each layer attends within a choice of PyTorch's backends, as layers of a team's own do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        for layer, backend in zip(
            model.model.layers, (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION), strict=True
        ):
            layer.forward = functools.partial(self._within, backend, layer.forward)

    def _within(self, backend: SDPBackend, forward: Any, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel([backend], set_priority=True):
            result = forward(*args, **kwargs)
            assert torch.nn.attention._cur_sdpa_kernel_backends() == [backend]
        return result

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


def test_a_choice_of_backends_is_a_lanes_own(pool_of_four: Cluster) -> None:
    """Both halves are in such a block when they take turns; nothing of it stays."""
    model, local = pair()
    (row,) = make_batches(lengths=([40, 30],))

    def choice() -> tuple[Any, ...]:
        backends = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
        return tuple(backends), tuple(torch._C._get_sdp_priority_order())

    before = choice()
    with attached(pool_of_four, model, "backends", turns=2):
        document_losses(_InBlocks(model)(**row).logits, row).backward()
    assert choice() == before
    for document in documents_in(row):
        document_losses(local(**document, use_cache=False).logits, document).backward()
    compare_gradients(model, local)


class Outputs(NamedTuple):
    """What a decoder may give."""

    hidden: torch.Tensor
    loss: None = None


def test_named_tuples_of_padded_rows_stay_what_they_are() -> None:
    rows = CallRows(RowDocuments([1, 2]), (2, 2), torch.tensor([0, 2, 3]))
    padded = rows.padded(Outputs(torch.ones(1, 3, 1)))
    assert isinstance(padded, Outputs)
    assert padded.hidden.flatten(1).tolist() == [[1, 0], [1, 1]]


def test_labels_per_rank() -> None:
    batches = [{"labels": torch.tensor([[3, -100, 5, 6]])}, {"labels": torch.tensor([[-100]])}]
    assert labels_per_rank(batches).item() == 2
    assert labels_per_rank([]).item() == 1
