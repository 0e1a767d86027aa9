"""Layers that need no gradients: their backward ticks do not come, and nobody waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from core_attention.manifest import RankManifest, Segment
from data_plane.transport import Connection
from tests.cluster.trainer_client.test_wrong_models import N_LAYERS, ROWS, SHAPE, Model, team_of
from tests.support.cluster import Cluster
from tests.support.loops import PingPong
from tests.support.team import Team
from tests.support.waiting import eventually
from trainer_client import Session, SessionError

PLACEMENTS = ["pool", "in-place", "mixed"]
SOON_SECONDS = 10.0


@pytest.fixture(params=PLACEMENTS)
def team(request: pytest.FixtureRequest, pool_of_four: Cluster) -> Iterator[Team]:
    with team_of(pool_of_four, request.param) as running:
        yield running


def documents(rank: int) -> RankManifest:
    """The first nano-batch holds a document that spans both ranks, the second some of its own."""
    return RankManifest(
        0,
        rank,
        (
            (Segment(1, 2 * ROWS, rank * ROWS, ROWS),),
            (Segment(10 + rank, 5, 0, 5), Segment(20 + rank, ROWS - 5, 0, ROWS - 5)),
        ),
    )


def alone(rank: int) -> RankManifest:
    return RankManifest.from_lengths(0, rank, [[ROWS], [1, ROWS - 1]])


def train(session: Session, step: int, frozen: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One step with the lowest layers frozen; the gradients of the others."""
    model = Model()
    for layer in model.layers[:frozen]:
        layer.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed + session.options.rank)
    width = SHAPE.num_heads * SHAPE.head_dim
    batches = [{"x": torch.randn(ROWS, width, generator=generator)} for _ in range(2)]
    with session.step(step):
        sum(o.square().mean() for o in PingPong(model)(batches)).backward()
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def run_all(team: Team, step: int, frozen: int) -> list[dict[str, torch.Tensor]]:
    futures = [
        team._threads[rank].submit(train, session, step, frozen)
        for rank, session in enumerate(team.sessions)
    ]
    return [future.result(SOON_SECONDS) for future in futures]


def connections(team: Team) -> set[Connection]:
    """Those that are open. A plan may use servers that no plan before has used."""
    return {c for session in team.sessions for c in session._servers._connections.values()}


@pytest.mark.parametrize("frozen", [1, N_LAYERS - 1])
def test_steps_are_complete_and_measured(team: Team, frozen: int) -> None:
    """The same gradients as in a step of which nothing is frozen, over the same connections."""
    whole = run_all(team, team.submit([documents(0), documents(1)])[0].step, 0)
    before = connections(team)
    for _ in range(3):
        step = team.submit([documents(0), documents(1)])[0].step
        for rank, gradients in enumerate(run_all(team, step, frozen)):
            assert set(gradients) == {
                name for name in whole[rank] if int(name.split(".")[1]) >= frozen
            }
            for name, gradient in gradients.items():
                # Plans differ by step: sums of dK and dV in another order, in float32.
                torch.testing.assert_close(gradient, whole[rank][name], rtol=1e-4, atol=1e-6)
    assert connections(team) >= before
    session = team.sessions[0]
    eventually(lambda: len(session.fetch_step(step).ranks) == team.n_ranks)
    eventually(lambda: any(any(m.backward_layers) for m in session.fetch_step(step).servers))
    for measured in session.fetch_step(step).servers:
        # A server may have tasks of the forward pass only.
        assert set(measured.backward_layers) <= {0, N_LAYERS - frozen}
    for each in team.sessions:
        assert each._steps.epoch == session._steps.epoch
        assert each._steps.may_be_asked(step - 1) is False


def test_ranks_out_of_step_do_not_disturb_each_other(team: Team) -> None:
    """One rank runs ahead by a step: the other is served to the end of its own."""
    first, second = (team.submit([alone(0), alone(1)])[0].step for _ in range(2))
    began = time.monotonic()
    for step in (first, second):
        team._threads[0].submit(train, team.sessions[0], step, 1).result(SOON_SECONDS)
    for step in (first, second):
        team._threads[1].submit(train, team.sessions[1], step, 1).result(SOON_SECONDS)
    assert time.monotonic() - began < SOON_SECONDS
    assert all(session._steps.epoch % 2**20 == 0 for session in team.sessions), "no recovery"


def evaluate(session: Session, step: int) -> None:
    width = SHAPE.num_heads * SHAPE.head_dim
    with session.step(step), torch.no_grad():
        PingPong(Model())([{"x": torch.randn(ROWS, width)} for _ in range(2)])


def test_evaluation_need_not_be_announced(team: Team) -> None:
    run_all(team, team.submit([documents(0), documents(1)])[0].step, 0)
    before = connections(team)
    for _ in range(2):
        step = team.submit([documents(0), documents(1)])[0].step
        futures = [
            team._threads[rank].submit(evaluate, session, step)
            for rank, session in enumerate(team.sessions)
        ]
        for future in futures:
            future.result(SOON_SECONDS)
        run_all(team, team.submit([documents(0), documents(1)])[0].step, 0)
    assert connections(team) >= before


def test_ranks_that_share_documents_must_train_the_same_layers(team: Team) -> None:
    step = team.submit([documents(0), documents(1)])[0].step
    futures = [
        team._threads[rank].submit(train, session, step, rank)
        for rank, session in enumerate(team.sessions)
    ]
    errors = [future.exception(SOON_SECONDS) for future in futures]
    assert errors[1] is None
    assert isinstance(errors[0], SessionError)


def test_a_lost_server_is_recovered_from_where_lanes_end_early(
    pool_of_four: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut(nn.Module):
        """Closes all connections in the middle of the step."""

        def __init__(self, session: Session) -> None:
            super().__init__()
            self.model = Model()
            for layer in self.model.layers[:2]:
                layer.requires_grad_(False)
            self.session = session

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.model(x)
            for connection in list(self.session._servers._connections.values()):
                connection.close("cut by the test")
            return x

    def train_cut(session: Session, step: int) -> torch.Tensor:
        width = SHAPE.num_heads * SHAPE.head_dim
        generator = torch.Generator().manual_seed(session.options.rank)
        batches = [{"x": torch.randn(ROWS, width, generator=generator)} for _ in range(2)]
        model = Cut(session)
        with session.step(step):
            sum(o.square().mean() for o in PingPong(model)(batches)).backward()
        gradient = model.model.layers[-1].get_submodule("qkv").get_parameter("weight").grad
        assert gradient is not None
        return gradient

    with team_of(pool_of_four, "pool") as team:
        expected = run_all(team, team.submit([documents(0), documents(1)])[0].step, 2)
        step = team.submit([documents(0), documents(1)])[0].step
        futures = [
            team._threads[rank].submit(train_cut, session, step)
            for rank, session in enumerate(team.sessions)
        ]
        for rank, future in enumerate(futures):
            name = f"layers.{N_LAYERS - 1}.qkv.weight"
            torch.testing.assert_close(
                future.result(30), expected[rank][name], rtol=1e-4, atol=1e-6
            )
        run_all(team, team.submit([documents(0), documents(1)])[0].step, 1)
