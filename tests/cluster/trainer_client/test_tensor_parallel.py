"""Tensor parallelism of transformers and PyTorch with served core attention, against one process.

Four ranks in processes of their own, over gloo: two tensor-parallel ranks, two replicas.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers.distributed.configuration_utils import DistributedConfig

import trainer_client.models.transformers
from core_attention.errors import TensorError
from core_attention.manifest import RankManifest, Segment
from core_attention.shape import AttentionShape
from tests.support.cluster import Cluster, cluster, keep_profile, on_this_host
from tests.support.errors import refused
from tests.support.gradients import assert_gradients
from tests.support.loops import PingPong, submitted
from tests.support.model_options import options_for
from tests.support.preloaded import run_forked
from tests.support.process_groups import process_group
from tests.support.tiny_models import TINY_LLAMA
from trainer_client import (
    PlanNotReady,
    Session,
    SessionError,
    SessionOptions,
    core_attention,
)
from trainer_client.hooks.tensor_parallel import mesh_of
from trainer_client.step.fsdp import prepare_turns

pytestmark = pytest.mark.timeout(300)

RANKS, TP, STEPS = 4, 2, 2
TOLERANCE = 2e-5
"""float32 through two layers, and sums over ranks: some hundred roundings of 6e-8."""
REPLICAS = RANKS // TP
CONFIG = TINY_LLAMA
VOCABULARY: int = CONFIG["vocab_size"]
LOCAL = AttentionShape(num_heads=2, num_heads_kv=1, head_dim=16, head_dim_v=16, dtype="float32")
ONE_HEAD = replace(LOCAL, num_heads=1)
LENGTHS = ([[7, 1, 13], [21]], [[5, 30], [3, 3, 9]])
"""By replica and nano-batch."""
SPAN = 37
"""Tokens of the one document of each nano-batch, cut at odd places among the replicas."""

Batch = Mapping[str, torch.Tensor]
Gradients = dict[str, torch.Tensor]


def whole_model(path: str) -> Any:
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_pretrained(path, attn_implementation="sdpa")


def by_plan_of_transformers(path: str, _: DeviceMesh) -> Any:
    """Sharded by transformers, over both dimensions, when it is loaded."""
    auto: Any = transformers.AutoModelForCausalLM
    sizes: Any = DistributedConfig(tp_size=TP, fsdp_size=REPLICAS)
    return auto.from_pretrained(path, attn_implementation="distca", distributed_config=sizes)


def by_parallelize_module(path: str, mesh: DeviceMesh) -> Any:
    """Sharded by PyTorch over the tensor-parallel ranks."""
    assert trainer_client.models.transformers.IMPLEMENTATION == "distca"
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(path, attn_implementation="distca")
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    plan: dict[str, Any] = {
        **{f"{attention}.{name}_proj": ColwiseParallel() for name in "qkv"},
        f"{attention}.o_proj": RowwiseParallel(),
        f"{mlp}.gate_proj": ColwiseParallel(),
        f"{mlp}.up_proj": ColwiseParallel(),
        f"{mlp}.down_proj": RowwiseParallel(),
    }
    return parallelize_module(model, mesh["tp"], plan)


def by_sequence_parallelism(path: str, mesh: DeviceMesh) -> Any:
    """Between projections each rank has a share of the rows."""
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(path, attn_implementation="distca")
    layer, rows, all_rows = "model.layers.*", Shard(1), Replicate()
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=all_rows, output_layouts=rows),
        f"{layer}.input_layernorm": SequenceParallel(use_local_output=True),
        f"{layer}.post_attention_layernorm": SequenceParallel(use_local_output=True),
        f"{layer}.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": rows},
            desired_input_kwarg_layouts={"hidden_states": all_rows},
        ),
        **{f"{layer}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        f"{layer}.self_attn.o_proj": RowwiseParallel(output_layouts=rows),
        f"{layer}.mlp": PrepareModuleInput(
            input_layouts=(rows,), desired_input_layouts=(all_rows,)
        ),
        f"{layer}.mlp.gate_proj": ColwiseParallel(),
        f"{layer}.mlp.up_proj": ColwiseParallel(),
        f"{layer}.mlp.down_proj": RowwiseParallel(output_layouts=rows),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=rows, output_layouts=all_rows),
    }
    return parallelize_module(model, mesh["tp"], plan)


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        name: of the job.
        make: the model, on the ranks of a mesh ``("dp", "tp")``.
        spans: whether each nano-batch is one document over both replicas.
        placement: where servers run.
        checkpointed: layers are recomputed.
        sharded: whether ``fully_shard`` is applied.
        lengths: of documents, by replica and nano-batch.
        model: folder of its weights.
    """

    name: str
    make: Callable[[str, DeviceMesh], Any]
    spans: bool = False
    placement: str = "in-place"
    checkpointed: bool = False
    sharded: bool = False
    lengths: Sequence[Sequence[Sequence[int]]] = LENGTHS
    model: str = "model"


CASES = (
    Case("tp-plan", by_plan_of_transformers),
    Case("tp-plan-pool", by_plan_of_transformers, placement="mixed", checkpointed=True),
    Case("parallelize-module", by_parallelize_module, sharded=True, placement="pool"),
    Case("over-replicas", by_parallelize_module, spans=True, sharded=True, checkpointed=True),
)
shares_of_rows = partial(
    Case, make=by_sequence_parallelism, lengths=[[[7, 1, 16], [3, 1]]], model="four-key-heads"
)
SHARES_OF_ROWS = (shares_of_rows("shares-of-rows"), shares_of_rows("sharded", sharded=True))
"""Each of the four ranks has a share of the rows: whatever runs the model, as the check of
documents, gives it a multiple of them."""


def ids_of(step: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + length)
    return torch.randint(VOCABULARY, (length,), generator=generator)


def documents(case: Case, step: int) -> list[torch.Tensor]:
    """Token ids of all documents, whole."""
    if case.spans:
        return [ids_of(step, SPAN + nano) for nano in range(2)]
    return [ids_of(step, n) for replica in case.lengths for nano in replica for n in nano]


def batch_of(ids: list[torch.Tensor], begins: list[int], ends: list[int]) -> Batch:
    """Rows ``[begin, end)`` of documents in a row; a label is the next token, if there is one."""
    pieces = list(zip(ids, begins, ends, strict=True))
    following = [torch.cat([each[1:], torch.tensor([-100])]) for each in ids]
    return {
        "input_ids": row_of([each[b:e] for each, b, e in pieces]),
        "position_ids": row_of([torch.arange(b, e) for _, b, e in pieces]),
        "labels": row_of([each[b:e] for each, (_, b, e) in zip(following, pieces, strict=True)]),
    }


def whole_documents(step: int, nano_batches: Sequence[Sequence[int]]) -> list[Batch]:
    return [
        batch_of([ids_of(step, n) for n in lengths], [0] * len(lengths), list(lengths))
        for lengths in nano_batches
    ]


def row_of(pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.arange(0), *pieces])[None]


def steps_of(case: Case, session: Session, replica: int) -> Iterator[tuple[int, list[Batch]]]:
    """What a replica's ranks run, with its manifests handed in: the same on all of them."""
    if not case.spans:
        batches = [whole_documents(step, case.lengths[replica]) for step in range(STEPS)]
        for step, nano_batches in submitted(session, batches):
            yield step, list(nano_batches)
        return
    rank = session.options.rank
    for step in range(STEPS):
        pieces = []
        for nano in range(2):
            length, cut = SPAN + nano, 11 + nano
            begin, end = ((0, cut), (cut, length))[replica]
            pieces.append((length, begin, end))
        # Ids are those of one tensor-parallel index.
        segments = [
            [Segment(10 * (rank % TP) + nano, length, begin, end - begin)]
            for nano, (length, begin, end) in enumerate(pieces)
        ]
        session.submit(RankManifest(step, rank, segments))
        yield step, [batch_of([ids_of(step, n)], [b], [e]) for n, b, e in pieces]


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")


class Losses(nn.Module):
    """The summed loss of a nano-batch."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, labels: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
        return summed_loss(self.model(**batch, use_cache=False).logits, labels)


def reference_of(path: str, documents: list[torch.Tensor]) -> tuple[float, Gradients]:
    """The summed loss and the gradients of documents, one by one in one process."""
    model = whole_model(path)
    total = torch.zeros(())
    for ids in documents:
        batch = dict(batch_of([ids], [0], [len(ids)]))
        labels = batch.pop("labels")
        total = total + summed_loss(model(**batch, use_cache=False).logits, labels)
    total.backward()
    return float(total), {name: p.grad for name, p in model.named_parameters()}


def job(address: str, folder: str, name: str) -> dict[str, Any]:
    return {
        "control_plane": address,
        "job": name,
        "rank": dist.get_rank(),
        "n_ranks": dist.get_world_size(),
        "planner": "random",
        **on_this_host(Path(folder)),
        "plan_timeout_seconds": 20.0,
        "tick_timeout_seconds": 20.0,
    }


def run_case(case: Case, folder: str, address: str, mesh: DeviceMesh, victim: int = 0) -> None:
    """A server, ``victim``, dies in the forward pass of the first step, when rows are on their way
    to it."""
    path, rank, n_shares = f"{folder}/{case.model}", dist.get_rank(), mesh["tp"].size()
    model = case.make(path, mesh)
    options = options_for(model, placement=case.placement, **job(address, folder, case.name))
    replica = rank // n_shares
    assert options.shape == (LOCAL if n_shares == TP else ONE_HEAD)
    first = replica * n_shares
    assert list(options.tensor_parallel_ranks) == list(range(first, first + n_shares))
    if case.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.sharded:
        for unit in (*model.model.layers, model):
            fully_shard(unit, mesh=mesh["dp"])
    prepare_turns(model)
    model.train()
    if victim and rank == 1:
        kill_before(model.model.layers[1].self_attn, victim)
    ping_pong = PingPong(Losses(model))
    with Session.open(options) as session:
        for step, batches in steps_of(case, session, replica):
            model.zero_grad()
            with session.step(step) as running:
                loss = torch.stack(ping_pong(batches)).sum()
                loss.backward()
            check(case, path, step, model, loss.detach(), n_shares)
            recoveries: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(recoveries, running.recoveries)
            # One for all ranks: they are in one job.
            assert set(recoveries) == {1 if victim and step == 0 else 0}


def kill_before(module: nn.Module, victim: int) -> None:
    alive = [victim]

    def kill(*_: Any) -> None:
        while alive:
            os.kill(alive.pop(), signal.SIGKILL)

    module.register_forward_pre_hook(kill)


def check(
    case: Case, path: str, step: int, model: nn.Module, loss: torch.Tensor, n_shares: int
) -> None:
    expected_loss, expected = reference_of(path, documents(case, step))
    dist.all_reduce(loss)
    # Ranks of one tensor-parallel group have the same loss.
    assert float(loss) / n_shares == pytest.approx(expected_loss, rel=1e-5), case.name
    # FSDP averages over the replicas.
    replicas = dist.get_world_size() // n_shares
    assert_gradients(model, expected, TOLERANCE, f"{case.name}, step {step}", factor=replicas)


def run_ranks(rank: int, folder: str, address: str) -> None:
    with joined(rank, RANKS, folder) as mesh:
        for case in CASES:
            run_case(case, folder, address, mesh)
        of_one = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "tp"))
        for case in SHARES_OF_ROWS:
            run_case(case, folder, address, of_one)


@contextmanager
def joined(rank: int, n_ranks: int, folder: str) -> Iterator[DeviceMesh]:
    """The mesh of a rank of torch.distributed."""
    # transformers asks torchrun's environment.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n_ranks)}
    with process_group(folder, rank, n_ranks):
        yield init_device_mesh("cpu", (n_ranks // TP, TP), mesh_dim_names=("dp", "tp"))


def save_model(path: Path, **changes: Any) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**CONFIG, **changes})
    transformers.LlamaForCausalLM(config).save_pretrained(path)


def test_tensor_parallel_replicas_train_as_one_process_does(
    tmp_path: Path, pool_of_four: Cluster
) -> None:
    for shape in (LOCAL, ONE_HEAD):
        keep_profile(tmp_path, shape)
    save_model(tmp_path / "model")
    save_model(tmp_path / "four-key-heads", num_key_value_heads=4)
    run_forked(run_ranks, (str(tmp_path), pool_of_four.address), RANKS)


@pytest.mark.parametrize("norms", [{}, {"1": SequenceParallel()}], ids=["some", "all weights"])
def test_shares_are_told_from_those_of_fully_shard(tmp_path: Path, norms: dict[str, Any]) -> None:
    """Also where tensor parallelism spreads every weight, so that all are on one mesh."""
    with process_group(tmp_path):
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), **norms})
        assert mesh_of(model) == mesh["tp"]
        fully_shard(model, mesh=mesh["dp"])
        assert mesh_of(model) == mesh["tp"]
        for of_replicas in (mesh["dp"], mesh):
            model = nn.Sequential(nn.Linear(8, 8))
            fully_shard(model, mesh=of_replicas)
            assert mesh_of(model) is None


LATE_SECONDS = 0.5
_LATE_ROWS = f"""
import threading
from attention_node.executor import Executor
arrive = Executor.arrive
def late(executor, tick, rank, source):
    seconds = {LATE_SECONDS} if tick.tick.nano_batch == rank % 2 else 0.0
    threading.Timer(seconds, arrive, (executor, tick, rank, source)).start()
Executor.arrive = late
"""
"""Of the first nano-batch on even ranks, of the second on odd ones."""


def run_ranks_with_late_replies(rank: int, folder: str, address: str) -> None:
    with joined(rank, TP, folder) as mesh:
        model = by_parallelize_module(f"{folder}/model", mesh)
        options = options_for(model, placement="pool", **job(address, folder, "late"))
        ran: list[tuple[str, int]] = []
        for layer in model.model.layers:
            # Each gathers what its ranks have, forward and backward.
            for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
                module.register_forward_hook(
                    lambda _, __, output: ran.append(("forward", output.shape[1]))
                )
                module.register_full_backward_hook(
                    lambda _, __, gradients: ran.append(("backward", gradients[0].shape[1]))
                )
        batches = whole_documents(0, [[7, 4], [5]])
        with Session.open(options) as session:
            for step, nano_batches in submitted(session, [batches]):
                with session.step(step) as running:
                    torch.stack(PingPong(Losses(model))(nano_batches)).sum().backward()
        assert running.report is not None
        assert len(ran) == 2 * 2 * 2 * 2, "modules, nano-batches, layers, phases"
        assert len(set(ran)) == 4
        everyone: list[Any] = [None] * TP
        dist.all_gather_object(everyone, (running.report.wait_seconds, ran))
        # Late replies did hold up the ranks, in more than one turn.
        assert max(waited for waited, _ in everyone) > 1.5 * LATE_SECONDS
        assert everyone[0][1] == everyone[1][1]


def test_turns_do_not_depend_on_whose_replies_come_first(tmp_path: Path) -> None:
    """Ranks whose replies come in opposite orders would else wait for each other in collectives."""
    keep_profile(tmp_path, LOCAL)
    save_model(tmp_path / "model")
    with cluster(tmp_path, 0, node_shape=LOCAL) as servers:
        servers.start_node("late", prelude=_LATE_ROWS)
        run_forked(run_ranks_with_late_replies, (str(tmp_path), servers.address), TP)


def run_ranks_that_are_wrong(rank: int, folder: str, address: str) -> None:
    with joined(rank, TP, folder) as mesh:
        of_job = job(address, folder, "wrong")
        for uneven in ("one-key-head", "three-heads"):
            with pytest.raises(SessionError):
                options_for(by_parallelize_module(f"{folder}/{uneven}", mesh), **of_job)
        model = by_parallelize_module(f"{folder}/model", mesh)
        with pytest.raises(SessionError):
            options_for(model, **{**of_job, "rank": 0})
        with pytest.raises(SessionError):
            options_for(model, n_nano_batches=rank + 1, **of_job)
        options = options_for(model, **of_job)
        with Session.open(options) as session:
            for step, lengths in enumerate(([3 + rank, 4], [7, 4])):
                session.submit(RankManifest.from_lengths(step, rank, [lengths, [2]]))
            with pytest.raises(PlanNotReady), session.step(0):
                raise AssertionError("a step was planned")
            # The job goes on.
            with session.step(1):
                losses = PingPong(Losses(model))(whole_documents(1, [[7, 4], [2]]))
                torch.stack(losses).sum().backward()


def test_ranks_that_do_not_fit_are_told_by_name(tmp_path: Path, pool_of_four: Cluster) -> None:
    keep_profile(tmp_path, LOCAL)
    save_model(tmp_path / "model")
    save_model(tmp_path / "one-key-head", num_key_value_heads=1)
    three = {"num_attention_heads": 3, "num_key_value_heads": 3}
    save_model(tmp_path / "three-heads", hidden_size=48, **three)
    run_forked(run_ranks_that_are_wrong, (str(tmp_path), pool_of_four.address), TP)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[DeviceMesh]:
    with process_group(tmp_path):
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))


def test_heads_that_are_spread_over_ranks_are_refused(alone: DeviceMesh) -> None:
    local = torch.zeros(3, 2, 16)
    spread = distribute_tensor(local, alone, [Shard(1)])
    with pytest.raises(TensorError):
        core_attention(local, spread, local)


def test_a_group_has_each_of_its_ranks_once() -> None:
    options: dict[str, Any] = {"control_plane": "127.0.0.1:1", "job": "j", "n_layers": 1}
    for group in ([1, 2], [0, 0], [0, 4]):
        with refused():
            SessionOptions(rank=0, n_ranks=4, shape=LOCAL, tensor_parallel_ranks=group, **options)


def run_ranks_while_a_server_dies(rank: int, folder: str, address: str, victim: int) -> None:
    case = Case("dying", by_parallelize_module, placement="pool", lengths=[[[17, 4, 1], [9]]])
    with joined(rank, TP, folder) as mesh:
        run_case(case, folder, address, mesh, victim)


def test_a_server_that_dies_costs_no_step(tmp_path: Path) -> None:
    keep_profile(tmp_path, LOCAL)
    save_model(tmp_path / "model")
    with cluster(tmp_path, 2, node_shape=LOCAL) as servers:
        victim = servers.processes[1].popen.pid
        arguments = (str(tmp_path), servers.address, victim)
        run_forked(run_ranks_while_a_server_dies, arguments, TP)
