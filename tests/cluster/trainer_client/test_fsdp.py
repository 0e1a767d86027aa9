"""FSDP2 around nano-batches of one's own: gradients of local attention. Ways to shard attached
models are loops of ``attach_runs``.

Two ranks in processes of their own, over gloo; each runs all cases, since starting costs more than
they do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from core_attention.manifest import RankManifest
from core_attention.shape import AttentionShape
from tests.support.block import Block
from tests.support.cluster import Cluster, keep_profile, on_this_host
from tests.support.gradients import assert_gradients
from tests.support.loops import PingPong
from tests.support.preloaded import run_forked
from tests.support.process_groups import process_group
from tests.support.reference import packed_attention
from trainer_client import (
    Session,
    SessionError,
    SessionOptions,
    core_attention,
)
from trainer_client.hooks.collectives import HostMeetings
from trainer_client.hooks.sharded_weights import check_backward_in_parts
from trainer_client.step.fsdp import prepare_turns

RANKS, WIDTH, N_LAYERS = 2, 32, 3
SHAPE = AttentionShape(num_heads=2, num_heads_kv=2, head_dim=16, head_dim_v=16, dtype="float32")
HALF = replace(SHAPE, dtype="bfloat16")
STEPS: tuple[Any, ...] = (
    # By step, rank and nano-batch: documents.
    (([7, 3], [12]), ([4], [1, 9])),
    (([20], [2, 2]), ([5, 6], [3])),
)
THREE: tuple[Any, ...] = ((([7, 3], [12], [2]), ([4], [1, 9], [8])),)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(SHAPE) for _ in range(N_LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)
        self.is_local = False

    def forward(self, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return packed_attention(q, k, v, lengths)[0].float()

        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden, alone if self.is_local else core_attention)
        logits = self.head(self.norm(hidden)).float()
        loss: torch.Tensor = nn.functional.cross_entropy(logits, ids, reduction="sum")
        return loss


def batches(documents: Any, rank: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        {"ids": torch.randint(16, (sum(lengths),), generator=generator), "lengths": lengths}
        for lengths in documents[rank]
    ]


Case = Callable[[Model], nn.Module]
"""Shards a model; returns what takes nano-batches."""


def root_inside(model: Model) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return PingPong(model)


def root_around(model: Model) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    whole: nn.Module = fully_shard(PingPong(model))  # type: ignore[assignment]
    prepare_turns(whole)
    return whole


def weights_kept_gathered(model: Model) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model)
    return PingPong(model)


def one_after_the_other(model: Model) -> nn.Module:
    root_inside(model)
    prepare_turns(model)
    return PingPong(model, interleave=False)


def unprepared_in_turn(model: Model) -> nn.Module:
    """FSDP2 as it is does for nano-batches that do not take turns."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return PingPong(model, interleave=False)


def run_step(session: Session, module: nn.Module, documents: Any, rank: int) -> None:
    number = session.next_step
    session.submit(RankManifest.from_lengths(number, rank, documents[rank]))
    with session.step(number) as running:
        torch.stack(module(batches(documents, rank))).sum().backward()
    assert running.complete


def reference(model: Model, documents: Any) -> Model:
    """A copy with the gradients of all ranks' documents, averaged over ranks as FSDP2 does."""
    local = copy.deepcopy(model)
    local.is_local = True
    local.zero_grad()
    for rank in range(RANKS):
        for batch in batches(documents, rank):
            (local(**batch) / RANKS).backward()
    return local


def gradients_equal_local_attention(session: Session, rank: int) -> None:
    n_nano_batches = session.options.n_nano_batches
    for case in (root_inside, root_around, one_after_the_other, unprepared_in_turn):
        torch.manual_seed(0)
        model = Model()
        plain = copy.deepcopy(model)
        module = case(model)
        for documents in STEPS if n_nano_batches == 2 else THREE:
            model.zero_grad()
            run_step(session, module, documents, rank)
            # float32 through three layers: some hundred roundings of 6e-8.
            assert_gradients(model, reference(plain, documents), 2e-5, case.__name__)
            # Nothing is left gathered.
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


class Counting(HostMeetings):
    """Counts the collectives that ranks meet before."""

    count = 0

    def before(self, name: str, group: dist.ProcessGroup, tensors: Any) -> None:
        self.count += 1
        super().before(name, group, tensors)


def weights_are_gathered_and_reduced_once(session: Session, rank: int) -> None:
    """For all nano-batches together, as a plain model does for its one batch."""
    model = Model()
    meetings = Counting(session.job_id, 2, lambda: None, 60.0, device_type="cpu")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    meetings.open()
    run_step(session, PingPong(model), STEPS[0], rank)
    meetings.close()
    # Forward every unit is gathered; backward all but the root again; then all are reduced.
    assert meetings.count == (N_LAYERS + 1) + N_LAYERS + (N_LAYERS + 1)


def weights_are_freed_between_forward_and_backward(session: Session, rank: int) -> None:
    """As ``fully_shard`` was told; also where there is no backward pass."""
    for case, freed in ((root_inside, True), (weights_kept_gathered, False)):
        model = Model()
        module = case(model)
        number = session.next_step
        session.submit(RankManifest.from_lengths(number, rank, STEPS[0][rank]), forward_only=True)
        with session.step(number), torch.no_grad():
            module(batches(STEPS[0], rank))
        for block in model.blocks:
            weights = {isinstance(parameter, DTensor) for parameter in block.parameters()}
            assert weights == {freed}, case.__name__


def weights_that_backwards_in_parts_would_miss(_: Session, __: int) -> None:
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for prepare in (lambda _: None, prepare_turns):
        prepare(model)
        with pytest.raises(SessionError):
            check_backward_in_parts(model)
    kept = Model()
    weights_kept_gathered(kept)
    check_backward_in_parts(kept)


def nano_batches_that_leave_early_are_an_error(session: Session, rank: int) -> None:
    """Backward of one nano-batch alone would lose the gradients of the others."""
    module = root_inside(Model())
    number = session.next_step
    session.submit(RankManifest.from_lengths(number, rank, STEPS[0][rank]))
    with pytest.raises(SessionError), session.step(number):
        module(batches(STEPS[0], rank))[0].backward()


def half_precision(session: Session, rank: int) -> None:
    """Units cast what enters them, of every nano-batch."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    run_step(session, PingPong(model), STEPS[0], rank)
    # Activations are rounded to 8 bits, 4e-3, in each of three layers, and so are gradients.
    assert_gradients(model.blocks, reference(plain, STEPS[0]).blocks, 5e-2)


OF_TWO = (
    gradients_equal_local_attention,
    weights_are_gathered_and_reduced_once,
    weights_are_freed_between_forward_and_backward,
    weights_that_backwards_in_parts_would_miss,
    nano_batches_that_leave_early_are_an_error,
)


def run_rank(rank: int, folder: str, address: str) -> None:
    with process_group(folder, rank, RANKS):
        for shape, n_nano_batches, bodies in (
            (SHAPE, 2, OF_TWO),
            (SHAPE, 3, (gradients_equal_local_attention,)),
            (HALF, 2, (half_precision,)),
        ):
            options = SessionOptions(
                control_plane=address,
                job=f"fsdp-{shape.dtype}-{n_nano_batches}",
                rank=rank,
                n_ranks=RANKS,
                n_layers=N_LAYERS,
                n_nano_batches=n_nano_batches,
                shape=shape,
                **on_this_host(Path(folder)),
            )
            with Session.open(options) as session:
                for body in bodies:
                    body(session, rank)


def test_sharded_models_take_turns(tmp_path: Path, pool_of_four: Cluster) -> None:
    for shape in (SHAPE, HALF):
        keep_profile(tmp_path, shape)
    run_forked(run_rank, (str(tmp_path), pool_of_four.address), RANKS)
