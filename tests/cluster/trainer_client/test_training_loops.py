"""Loops of other libraries around whole rows, and ways of training, beside local attention."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.attention import SDPBackend, sdpa_kernel

import trainer_client
from core_attention.manifest import RankManifest
from tests.cluster.trainer_client.test_at_home import compare_gradients, pair, pair_of
from tests.cluster.trainer_client.test_transformers import (
    CONFIGS,
    LENGTHS,
    MIXED,
    document_losses,
    documents_in,
    make_batches,
    make_model,
    open_session,
)
from tests.support.cluster import Cluster
from tests.support.loops import PingPong, attached
from tests.support.process_groups import process_group
from trainer_client import Session, SessionError, labels_per_rank
from trainer_client.attach.call_rows import CallRows
from trainer_client.attach.decoder import decoder_of
from trainer_client.models.transformers import UnsupportedModel, check_documents

ROWS = ([40, 1, 90, 7], [200], [1], [3, 3, 3])


@pytest.fixture(scope="module")
def session(pool_of_four: Cluster) -> Iterator[Session]:
    with open_session(pool_of_four, "training-loops") as opened:
        yield opened


def submit(session: Session, lengths: tuple[list[int], ...] = LENGTHS) -> int:
    step = session.next_step
    session.submit(RankManifest.from_lengths(step, 0, lengths))
    return step


def rows() -> list[dict[str, torch.Tensor]]:
    """Whole rows, of several documents or one, of one token, and of equal documents."""
    batches = make_batches(lengths=ROWS)
    for batch in batches:
        batch["labels"] = batch["input_ids"].where(batch["position_ids"] > 0, -100)
    return batches


def trained(model: Any, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    """Losses of a plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        loss = model(**batch, num_items_in_batch=labels_per_rank([batch])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def counted() -> list[dict[str, torch.Tensor]]:
    return [batch | {"num_items_in_batch": labels_per_rank([batch])} for batch in rows()]


def compare_weights(model: Any, local: Any) -> None:
    for (name, mine), other in zip(model.named_parameters(), local.parameters(), strict=True):
        # Steps of AdamW of 1e-3 each, along gradients over their own size: where these are near
        # zero, rounding decides.
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize("options", [{}, {"turns": 2}, {"turns": 2, "cut_documents": True}])
def test_accelerate(pool_of_four: Cluster, options: dict[str, Any]) -> None:
    """A loop that calls the model with whole rows, beside the same one with local attention."""
    model, local = pair()
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    with attached(pool_of_four, model, f"accelerate-{len(options)}", **options):
        for batch in counted():
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses == pytest.approx(trained(local, rows()), rel=1e-5)
    compare_weights(model, local)


@pytest.mark.parametrize(
    ("name", "locally"), [("Gemma3", "sdpa"), ("gpt-oss", "eager"), ("Llama4", "sdpa")]
)
def test_windows_in_rows_split_in_their_middle(
    pool_of_four: Cluster, name: str, locally: str
) -> None:
    for n, batch in enumerate(make_batches(lengths=ROWS)):
        model, local = pair_of(MIXED[name], locally)
        with attached(pool_of_four, model, f"cut-{name}-{n}", turns=2, cut_documents=True):
            document_losses(model(**batch).logits, batch).backward()
        for document in documents_in(batch):
            document_losses(local(**document, use_cache=False).logits, document).backward()
        compare_gradients(model, local)


def test_a_row_of_two_tokens_split_in_its_middle(pool_of_four: Cluster) -> None:
    """Each half has one row, which does not tell a causal mask from another."""
    model, local = pair()
    (row,) = make_batches(lengths=([2],))
    del row["labels"]
    with attached(pool_of_four, model, "two-tokens", turns=2, cut_documents=True):
        model(**row).logits.square().mean().backward()
    local(**row).logits.square().mean().backward()
    compare_gradients(model, local)


def test_accumulation_within_a_step(session: Session) -> None:
    """Nano-batches of their own backward passes."""
    model, local = pair()
    batches = make_batches()
    with session.step(submit(session)):
        for index, batch in enumerate(batches):
            with trainer_client.in_nano_batch(index):
                loss = model(**batch).loss
            loss.backward()
    for batch in batches:
        local(**batch).loss.backward()
    compare_gradients(model, local)


@pytest.fixture
def alone_in_a_group(tmp_path: Path) -> Iterator[None]:
    with process_group(tmp_path):
        yield


def by_fsdp1(layers: nn.ModuleList) -> None:
    layers[0] = FullyShardedDataParallel(layers[0], device_id=torch.device("cpu"))


def by_zero_3(layers: nn.ModuleList) -> None:
    for index, parameter in enumerate(layers[0].parameters()):
        untyped: Any = parameter
        untyped.ds_id = index


@pytest.mark.usefixtures("alone_in_a_group")
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


def test_losses_of_lower_layers(session: Session) -> None:
    """Beside the last layer's, and alone with the upper layers tied in."""
    model, local = pair()
    for tied in (False, True):
        batches = make_batches()
        with session.step(submit(session)):
            outputs = PingPong(model)([b | {"output_hidden_states": True} for b in batches])
            torch.stack([loss_of(output, tied) for output in outputs]).sum().backward()
        for batch in batches:
            loss_of(local(**batch, output_hidden_states=True), tied).backward()
        compare_gradients(model, local)
        model.zero_grad()
        local.zero_grad()


def loss_of(output: Any, tied: bool) -> torch.Tensor:
    middle = output.hidden_states[1].square().mean()
    loss: torch.Tensor = middle + (0 * output.logits.sum() if tied else output.loss)
    return loss


def test_a_served_reference_model(pool_of_four: Cluster) -> None:
    """Its layers are the job's first ones."""

    class Both(torch.nn.Module):
        def __init__(self, policy: Any, reference: Any) -> None:
            super().__init__()
            self.policy, self.reference = policy, reference

        def forward(self, **batch: Any) -> torch.Tensor:
            with torch.no_grad():
                expected = self.reference(**batch).logits
            loss: torch.Tensor = (self.policy(**batch).logits - expected).square().mean()
            return loss

    policy, local = pair()
    references = [make_model(copy.deepcopy(CONFIGS["Llama"]), i) for i in ("distca", "sdpa")]
    for reference in references:
        torch.manual_seed(7)
        torch.nn.init.normal_(reference.lm_head.weight)  # type: ignore[arg-type, union-attr]
    batches = make_batches()
    with open_session(pool_of_four, "both") as two:
        options = replace(two.options, job="served-reference", n_layers=4)
    with Session.open(options) as session, session.step(submit(session)):
        sum(PingPong(Both(policy, references[0]))(batches)).backward()
    for batch in batches:
        Both(local, references[1])(**batch).backward()
    compare_gradients(policy, local)


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
        return self.model(**batch).loss


def test_a_choice_of_backends_is_a_lanes_own(session: Session) -> None:
    """Both nano-batches are in such a block when they take turns; nothing of it stays."""
    model, local = pair()
    batches = make_batches()

    def choice() -> tuple[Any, ...]:
        backends = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
        return tuple(backends), tuple(torch._C._get_sdp_priority_order())

    before = choice()
    with session.step(submit(session)):
        sum(PingPong(_InBlocks(model))(batches)).backward()
    assert choice() == before
    for batch in batches:
        local(**batch).loss.backward()
    compare_gradients(model, local)


@pytest.mark.parametrize("interleave", [True, False])
def test_state_that_nano_batches_mix_is_named(
    session: Session, interleave: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A hook keeps the last output, which is the other nano-batch's by the time it is read."""
    model, _ = pair()
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda mlp, _, output: setattr(mlp, "last", output))
    for _ in range(2):
        with session.step(submit(session)):
            sum(o.loss for o in PingPong(model, interleave=interleave)(make_batches())).backward()
    named = [each.message for each in caplog.records if "on its modules" in each.message]
    assert len(named) == (1 if interleave else 0)
    assert all("keeps model.layers.0.mlp.last" in message for message in named)


class Outputs(NamedTuple):
    """What a decoder may give."""

    hidden: torch.Tensor
    loss: None = None


def test_named_tuples_of_padded_rows_stay_what_they_are() -> None:
    rows = CallRows([1, 2], (2, 2), torch.tensor([0, 2, 3]))
    padded = rows.padded(Outputs(torch.ones(1, 3, 1)))
    assert isinstance(padded, Outputs)
    assert padded.hidden.flatten(1).tolist() == [[1, 0], [1, 1]]


def test_labels_per_rank() -> None:
    batches = [{"labels": torch.tensor([[3, -100, 5, 6]])}, {"labels": torch.tensor([[-100]])}]
    assert labels_per_rank(batches).item() == 2
    assert labels_per_rank([]).item() == 1
