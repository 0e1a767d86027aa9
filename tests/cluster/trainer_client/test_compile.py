"""``torch.compile`` of models that call core attention: it stays outside of graphs, and lanes take
turns between them."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline

from core_attention.manifest import RankManifest
from core_attention.shape import AttentionShape
from tests.cluster.trainer_client.test_transformers import open_session
from tests.support.block import Block
from tests.support.cluster import Cluster
from tests.support.gradients import assert_gradients
from tests.support.loops import PingPong
from trainer_client import Session, checkpoint

SHAPE = AttentionShape(num_heads=2, num_heads_kv=2, head_dim=16, head_dim_v=16, dtype="float32")
LENGTHS = ([9, 1, 30], [17, 5])
WIDTH, N_LAYERS = 32, 2
Compile = Callable[["Small"], nn.Module]
"""Makes what is called with the nano-batches."""


class Small(nn.Module):
    """Layers, each in an activation checkpoint if wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(SHAPE) for _ in range(N_LAYERS))
        self.checkpointed = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden) if self.checkpointed else layer(hidden)
        return hidden


@pytest.fixture(scope="module")
def session(pool_of_four: Cluster) -> Iterator[Session]:
    with open_session(pool_of_four, "compile", shape=SHAPE, n_layers=N_LAYERS) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


def run_step(session: Session, model: nn.Module, lengths: Any = LENGTHS, seed: int = 0) -> None:
    """Forward and backward; rows differ by step, lane and seed."""
    step = session.next_step
    session.submit(RankManifest.from_lengths(step, 0, lengths))
    generator = torch.Generator().manual_seed(seed)
    batches = [
        {"hidden": torch.randn(sum(each), WIDTH, generator=generator, requires_grad=True)}
        for each in lengths
    ]
    with session.step(step) as running:
        sum(o.pow(2).sum() for o in model(batches)).backward()
    assert running.complete


def whole(model: Small) -> nn.Module:
    compiled: Any = torch.compile(model, backend="aot_eager")
    return PingPong(compiled)


def by_layer(model: Small) -> nn.Module:
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return PingPong(model)


def around(model: Small) -> nn.Module:
    compiled: Any = torch.compile(PingPong(model), backend="aot_eager")
    wrapped: nn.Module = compiled
    return wrapped


def checkpoints_in_graph(model: Small) -> nn.Module:
    model.checkpointed = True
    return whole(model)


def graphs_in_checkpoints(model: Small) -> nn.Module:
    model.checkpointed = True
    return by_layer(model)


@pytest.mark.parametrize(
    "compiled", [whole, by_layer, around, checkpoints_in_graph, graphs_in_checkpoints]
)
def test_gradients_equal_those_of_the_plain_model(session: Session, compiled: Compile) -> None:
    """Several steps with other lengths: what is compiled while the other lane waits differs."""
    torch.manual_seed(0)
    model, plain = Small(), Small()
    plain.load_state_dict(model.state_dict())
    runs = compiled(model), PingPong(plain)
    for seed, lengths in enumerate((LENGTHS, ([4], [8, 3]), ([2, 20], [31]))):
        for run, module in zip(runs, (model, plain), strict=True):
            module.zero_grad()
            run_step(session, run, lengths, seed)
        # float32: the graphs hold the same operations, some of them fused.
        assert_gradients(model, plain, 2e-6)


def test_no_lane_falls_out_of_its_graphs(session: Session) -> None:
    """Dynamo's state belongs to the thread, and lanes share one: taking turns, they run the graphs
    that they run one after the other, and nothing is compiled after them."""
    ran: list[torch.fx.GraphModule] = []

    def counting(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            ran.append(module)
            return module(*inputs)

        return run

    compiled: Any = torch.compile(Small(), backend=counting)
    counts = []
    for interleave in (False, True, True):
        ran.clear()
        run_step(session, PingPong(compiled, interleave=interleave))
        Block(SHAPE).qkv(torch.ones(3, WIDTH))
        counts.append(len(ran))
    # Each layer has one graph before core attention and one after it, in each lane.
    assert counts == [2 * N_LAYERS * len(LENGTHS)] * 3


def test_one_graph_is_refused(session: Session) -> None:
    compiled: Any = torch.compile(Small(), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError):
        run_step(session, PingPong(compiled))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_compiles_a_model(session: Session) -> None:
    torch.manual_seed(0)
    model = Small()
    plain = copy.deepcopy(model)
    compiled: Any = torch.compile(model)
    run_step(session, PingPong(compiled))
    run_step(session, PingPong(plain))
    # float32: fused kernels round sums of up to 96 products in another order.
    assert_gradients(model, plain, 1e-5)


def test_a_model_that_is_traced_into_stages_is_refused() -> None:
    with pytest.raises(RuntimeError) as caught:
        pipeline(
            nn.Sequential(Block(SHAPE), Block(SHAPE)),
            mb_args=(torch.zeros(8, WIDTH),),
            split_spec={"1": SplitPoint.BEGINNING},
        )
    assert "make each stage's module by hand" in str(caught.value.__cause__)
