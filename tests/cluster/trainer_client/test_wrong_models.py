"""Models and loops that do something else than the job was told: the rank at fault gets an error
that names it, at once; the others hear of it, and nobody waits for what cannot come any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn

from core_attention.manifest import RankManifest, Segment
from core_attention.shape import AttentionShape
from tests.support.block import Block
from tests.support.cluster import Cluster
from tests.support.loops import PingPong
from tests.support.team import Team
from trainer_client import Session, SessionError, in_nano_batch

SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=16, head_dim_v=16, dtype="float32")
ROWS = 24
N_LAYERS = 3
SOON_SECONDS = 15.0
"""Below every deadline of a tick (60 s here), on two cores that other tests may be using too; what
cannot come any more must not be waited for longer than 30 s."""


class Model(nn.Module):
    """Layers one after the other.

    Args:
        n_layers: how many.
        between: called with a layer's number and result; what it returns goes on.
    """

    def __init__(
        self,
        n_layers: int = N_LAYERS,
        between: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, x: x,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(SHAPE) for _ in range(n_layers))
        # Ranks are threads here, and PyTorch's generator, which lanes set, is the process's.
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.125, 0.125, generator=generator)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = self.between(number, layer(x))
        return x


def inputs(session: Session) -> list[dict[str, torch.Tensor]]:
    width = SHAPE.num_heads * SHAPE.head_dim
    return [{"x": torch.randn(ROWS, width)} for _ in range(session.options.n_nano_batches)]


def run(session: Session, step: int, model: nn.Module) -> None:
    """What a right training loop does."""
    with session.step(step):
        sum(o.square().mean() for o in PingPong(model)(inputs(session))).backward()


class Broken(Exception):
    """Raised by a model of the tests."""


def breaks_at(layer: int) -> Model:
    def between(number: int, x: torch.Tensor) -> torch.Tensor:
        if number == layer:
            raise Broken(f"after layer {layer}")
        return x

    return Model(between=between)


def breaks_in_backward(layer: int) -> Model:
    def raising(_: torch.Tensor) -> None:
        raise Broken(f"in the backward pass of layer {layer}")

    def between(number: int, x: torch.Tensor) -> torch.Tensor:
        if number == layer:
            x.register_hook(raising)
        return x

    return Model(between=between)


class LowerLayersOnly(Model):
    """The loss does not depend on the last layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lower = x
        for layer in self.layers[:-1]:
            lower = layer(lower)
        self.layers[-1](lower)
        return lower


class OneLaneBreaks(Model):
    """The second nano-batch fails; the first is in the middle of its forward pass."""

    runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if self.runs == 2:
            raise Broken("in the second nano-batch")
        return super().forward(x)


def detaches(layer: int) -> Model:
    return Model(between=lambda number, x: x.detach() if number == layer else x)


def no_backward(session: Session, step: int) -> None:
    with session.step(step):
        PingPong(Model())(inputs(session))


def backward_of_some_lanes(session: Session, step: int) -> None:
    with session.step(step):
        PingPong(Model())(inputs(session))[0].sum().backward()


def backward_twice(session: Session, step: int) -> None:
    with session.step(step):
        loss = sum(o.sum() for o in PingPong(Model())(inputs(session)))
        assert isinstance(loss, torch.Tensor)
        loss.backward(retain_graph=True)
        loss.backward()


def without_ping_pong(session: Session, step: int) -> None:
    with session.step(step):
        Model()(inputs(session)[0]["x"]).sum().backward()


def transformed(session: Session, step: int) -> None:
    with session.step(step):
        torch.func.grad(lambda x: Model()(x).sum())(inputs(session)[0]["x"])


def breaks_after_the_forward(session: Session, step: int) -> None:
    with session.step(step):
        PingPong(Model())(inputs(session))
        raise Broken("between forward and backward")


def nothing_at_all(session: Session, step: int) -> None:
    with session.step(step):
        pass


def runs(model: Callable[[], nn.Module]) -> Callable[[Session, int], None]:
    return lambda session, step: run(session, step, model())


WRONG: dict[str, Callable[[Session, int], None]] = {
    "one call too few": runs(lambda: Model(2)),
    "one call too many": runs(lambda: Model(4)),
    "nothing at all": nothing_at_all,
    "a loss without the top layer": runs(LowerLayersOnly),
    "detached in the middle": runs(lambda: detaches(0)),
    "no backward": no_backward,
    "backward of some lanes": backward_of_some_lanes,
    "backward twice": backward_twice,
    "without PingPong": without_ping_pong,
    "a transform": transformed,
    "an error before the first call": runs(OneLaneBreaks),
    "an error in the forward pass": runs(lambda: breaks_at(0)),
    "an error before backward": breaks_after_the_forward,
    "an error in backward": runs(lambda: breaks_in_backward(0)),
}


def spanning(rank: int) -> RankManifest:
    """Both ranks need each other's rows, in both nano-batches."""
    shared = [(Segment(number, 2 * ROWS, rank * ROWS, ROWS),) for number in (1, 2)]
    return RankManifest(0, rank, tuple(shared))


def apart(rank: int) -> RankManifest:
    return RankManifest.from_lengths(0, rank, [[ROWS], [ROWS]])


@contextmanager
def team_of(cluster: Cluster, placement: str, n_ranks: int = 2, **options: Any) -> Iterator[Team]:
    settings = {"tick_timeout_seconds": 60.0, "plan_timeout_seconds": 60.0, **options}
    with Team(cluster, n_ranks, SHAPE, placement=placement, n_layers=N_LAYERS, **settings) as team:
        yield team


def start(
    team: Team, rank: int, step: int, run_step: Callable[[Session, int], None]
) -> Future[None]:
    return team._threads[rank].submit(run_step, team.sessions[rank], step)


@pytest.mark.parametrize(("wrong", "placement"), zip(WRONG, cycle(["pool", "in-place"])))
def test_a_wrong_model_is_refused_and_nobody_waits_for_it(
    pool_of_four: Cluster, wrong: str, placement: str
) -> None:
    """The rank at fault catches its error and does nothing more: the one beside it, which needs its
    rows, must not wait for a deadline."""
    with team_of(pool_of_four, placement) as team:
        began = time.monotonic()
        (step, *_) = [m.step for m in team.submit([spanning(0), spanning(1)])]
        other = start(team, 1, step, runs(Model))
        with pytest.raises(Broken if wrong.startswith("an error") else RuntimeError):
            start(team, 0, step, WRONG[wrong]).result(SOON_SECONDS)
        error = other.exception(SOON_SECONDS)
        assert time.monotonic() - began < SOON_SECONDS
        assert isinstance(error, SessionError | None)


@pytest.mark.parametrize("placement", ["pool", "in-place"])
@pytest.mark.parametrize("wrong", ["one call too few", "no backward", "an error in backward"])
def test_ranks_that_need_no_rows_of_a_wrong_one_go_on(
    pool_of_four: Cluster, placement: str, wrong: str
) -> None:
    with team_of(pool_of_four, placement) as team:
        for _ in range(2):
            (step, *_) = [m.step for m in team.submit([apart(0), apart(1)])]
            futures = [start(team, 0, step, WRONG[wrong]), start(team, 1, step, runs(Model))]
            assert futures[0].exception(SOON_SECONDS) is not None
            futures[1].result(SOON_SECONDS)
        (step, *_) = [m.step for m in team.submit([spanning(0), spanning(1)])]
        for future in [start(team, rank, step, runs(Model)) for rank in range(2)]:
            future.result(SOON_SECONDS)


@pytest.mark.parametrize("placement", ["pool", "in-place"])
def test_a_step_given_up_by_all_is_no_failure(pool_of_four: Cluster, placement: str) -> None:
    """As when the loss is not finite, which ranks tell each other before backward."""
    told = threading.Barrier(2)

    def give_up(session: Session, step: int) -> None:
        with session.step(step) as running:
            PingPong(Model())(inputs(session))
            told.wait(SOON_SECONDS)
            running.give_up("the loss is nan")

    with team_of(pool_of_four, placement) as team:
        for run_step in (give_up, runs(Model), give_up, give_up, runs(Model)):
            (step, *_) = [m.step for m in team.submit([spanning(0), spanning(1)])]
            futures = [start(team, rank, step, run_step) for rank in range(2)]
            for future in futures:
                future.result(SOON_SECONDS)
        assert all(session._link.failure is None for session in team.sessions)


@pytest.mark.parametrize("placement", ["pool", "in-place"])
def test_ranks_with_different_orders_fail_and_no_server_is_blamed(
    pool_of_four: Cluster, placement: str
) -> None:
    """Rank 0 waits for rank 1 in a tick, and rank 1 for rank 0 where gradients are reduced: of that
    nobody hears. The document of nano-batch 0 is on both ranks."""
    reduced = threading.Barrier(2)

    def accumulate(session: Session, step: int, order: tuple[int, ...]) -> None:
        model = Model()
        with session.step(step):
            for nano_batch in order:
                with in_nano_batch(nano_batch):
                    loss = model(inputs(session)[nano_batch]["x"]).sum()
                loss.backward()
                reduced.wait(60)

    shared = [(Segment(1, 2 * ROWS, rank * ROWS, ROWS),) for rank in range(2)]
    manifests = [
        RankManifest(0, rank, (shared[rank], (Segment(2 + rank, ROWS, 0, ROWS),)))
        for rank in range(2)
    ]
    with team_of(pool_of_four, placement) as team:
        began = time.monotonic()
        (step, _) = [m.step for m in team.submit(manifests)]
        orders = ((0, 1), (1, 0))
        first, second = (
            start(team, rank, step, partial(accumulate, order=orders[rank])) for rank in range(2)
        )
        error = first.exception(SOON_SECONDS)
        assert time.monotonic() - began < SOON_SECONDS
        assert isinstance(error, SessionError)
        reduced.abort()
        assert second.exception(SOON_SECONDS) is not None
        assert (
            team.sessions[0].metrics_registry.get_sample_value(
                "distca_trainer_recovery_seconds_count",
                {"job_name": team.sessions[0].options.job, "rank": "0"},
            )
            == 0
        )
