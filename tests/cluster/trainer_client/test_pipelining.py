"""Stages of ``torch.distributed.pipelining`` with served core attention, against one process.

Four ranks in processes of their own, over gloo; each runs all cases, since starting costs more than
they do.
"""

from __future__ import annotations

import copy
import itertools
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from core_attention.errors import ScheduleError
from core_attention.manifest import RankManifest, Segment
from core_attention.schedule_orders import SCHEDULES
from core_attention.shape import AttentionShape
from tests.support.block import Block
from tests.support.cluster import Cluster, cluster, keep_profile, on_this_host
from tests.support.cut_manifests import cut_in_two, in_halves
from tests.support.preloaded import run_forked
from tests.support.process_groups import process_group
from trainer_client import (
    Pipeline,
    Pipelining,
    Placement,
    Session,
    SessionError,
    SessionOptions,
    checkpoint,
    defer_weights,
    measure_stages,
    schedule_of,
)
from trainer_client import core_attention as served
from trainer_client.pipelines.pipelining import (
    _check_stages,
    _with_its_own_errors,
    in_microbatch,
    run_rows_in_turns,
    runtime_of,
)
from trainer_client.step.lane import current_step, in_nano_batch
from trainer_client.turns.microbatch_rows import cut_of
from trainer_client.turns.parts import RowPart

RANKS, WIDTH, ROWS, VOCABULARY, WINDOW = 4, 32, 24, 16, 5
SHAPE = AttentionShape(num_heads=2, num_heads_kv=1, head_dim=16, head_dim_v=16, dtype="float32")


class Part(nn.Module):
    """A whole model, or one stage of it: parameters have the whole model's names."""

    def __init__(self, whole: Part | None, stage: int, layers: Sequence[int]) -> None:
        super().__init__()
        begin, n_stages = sum(layers[:stage]), len(layers)
        numbers = range(begin, begin + layers[stage])
        if whole is None:
            self.embed: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleDict({str(i): Block(SHAPE) for i in numbers})
            self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY)
        else:
            self.embed = copy.deepcopy(whole.embed) if stage == 0 else None
            self.blocks = nn.ModuleDict(
                {str(i): copy.deepcopy(whole.blocks[str(i)]) for i in numbers}
            )
            self.head = copy.deepcopy(whole.head) if stage == n_stages - 1 else None
        self.stage = stage
        self.attend: Any = served
        self.checkpointed = False
        self.windowed: frozenset[str] = frozenset()

    def forward(
        self, hidden: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.embed is not None:
            hidden = self.embed(hidden)
        for name, block in self.blocks.items():
            attend = self.attend
            if name in self.windowed:
                attend = partial(attend, window=WINDOW)
            if self.checkpointed:
                hidden = checkpoint(block, hidden, attend)
            else:
                hidden = block(hidden, attend)
        return hidden if self.head is None else self.head(hidden)


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), ids.flatten(), reduction="sum")


def alone(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """Attention within one document, by PyTorch."""
    mask = torch.ones(len(q), len(q), dtype=torch.bool).tril().triu(1 - (window or len(q)))
    q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
    o = nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return o.transpose(0, 1)


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        name: in errors.
        schedule: of PyTorch: its class, or what makes one.
        n_pipeline_ranks: of each pipeline; the others are replicas.
        n_microbatches: of each replica.
        n_chunks: stages a rank.
        spans: whether the only document of each microbatch lies on all replicas.
        checkpointed: activation checkpoints around blocks.
        kills: by step, the rank, method of its stage and microbatch before which a server dies.
        placement: where servers run.
        n_rows: nano-batches of a microbatch; more than one is planned by the schedule.
        is_planned: whether the session knows the schedule.
        replicated: by what replicas share gradients: nothing, ``"ddp"`` or ``"fsdp"``.
        layers: of each stage; N_LAYERS_A_CHUNK each if empty.
        is_packed: whether a microbatch's nano-batches are parts of one row, of unequal lengths.
        is_cut: whether that row is cut in its middle, inside documents.
        meets_on_host: whether stages tell each other what they send, as on GPUs.
        defers: whether linear layers put off their weights' gradients.
        windowed: stages all of whose layers have a window, so that none is served.
    """

    name: str
    schedule: Callable[..., Any]
    n_pipeline_ranks: int
    n_microbatches: int
    n_chunks: int = 1
    spans: bool = False
    checkpointed: bool = False
    placement: Placement = Placement.IN_PLACE
    kills: tuple[tuple[int, str, int], ...] = ()
    n_rows: int = 1
    is_planned: bool = False
    replicated: str = ""
    layers: tuple[int, ...] = ()
    is_packed: bool = False
    is_cut: bool = False
    meets_on_host: bool = False
    defers: bool = False
    windowed: tuple[int, ...] = ()

    @property
    def n_replicas(self) -> int:
        return RANKS // self.n_pipeline_ranks

    @property
    def n_stages(self) -> int:
        return self.n_pipeline_ranks * self.n_chunks

    @property
    def microbatch_shape(self) -> tuple[int, int]:
        """Rows of a microbatch, and tokens of each."""
        return (1, ROWS) if self.is_packed else (self.n_rows, ROWS // self.n_rows)

    @property
    def layers_of_stages(self) -> tuple[int, ...]:
        return self.layers or (N_LAYERS_A_CHUNK,) * self.n_stages

    @property
    def served_layers(self) -> tuple[int, ...]:
        """Of each stage."""
        layers = enumerate(self.layers_of_stages)
        return tuple(0 if stage in self.windowed else n for stage, n in layers)

    @property
    def windowed_blocks(self) -> frozenset[str]:
        """Of the whole model."""
        begins = list(itertools.accumulate(self.layers_of_stages, initial=0))
        return frozenset(
            str(at) for stage in self.windowed for at in range(begins[stage], begins[stage + 1])
        )

    @property
    def most_layers(self) -> int:
        """Of a rank, that are served."""
        of_rank = [
            sum(self.served_layers[rank :: self.n_pipeline_ranks])
            for rank in range(self.n_pipeline_ranks)
        ]
        return max(of_rank)


def ordered(name: str, stage: PipelineStage, n_microbatches: int, **options: Any) -> Any:
    """PyTorch's runtime with our order."""
    return runtime_of(SCHEDULES[name](stage.num_stages, n_microbatches), [stage], **options)


zero_bubble, split = partial(ordered, "zero-bubble"), partial(ordered, "1f1b-split")

in_turns = partial(Case, n_rows=2, is_planned=True)
"""Two nano-batches a microbatch, each of them a row."""
packed = partial(in_turns, is_packed=True)
halved = partial(packed, is_cut=True)
Settings = dict[str, Any]
POOL: Settings = {"placement": Placement.POOL}
MIXED: Settings = {"placement": Placement.MIXED}
AS_ON_GPUS: Settings = {"meets_on_host": True}
CHECKPOINTED: Settings = {"checkpointed": True}
LATER: Settings = {"defers": True}
UNEQUAL = (2, 3, 2, 1)

CASES = (
    Case("four stages", Schedule1F1B, 4, 6),
    Case("four stages, pool", Schedule1F1B, 4, 4, **POOL, **AS_ON_GPUS),
    Case("two stages, two replicas", Schedule1F1B, 2, 4, **CHECKPOINTED),
    Case("documents over replicas", Schedule1F1B, 2, 3, spans=True),
    Case("all forwards first", ScheduleGPipe, 2, 8, **AS_ON_GPUS),
    Case("two a rank", ScheduleInterleaved1F1B, 2, 4, n_chunks=2, **CHECKPOINTED, **AS_ON_GPUS),
    Case("backwards in two parts", ScheduleInterleavedZeroBubble, 2, 4, n_chunks=2, **AS_ON_GPUS),
    Case("idle-aware", Schedule1F1B, 4, 4, is_planned=True),
    in_turns("idle-aware, in turns", Schedule1F1B, 4, 5, **CHECKPOINTED),
    in_turns("idle-aware, in turns, pool and replicas", Schedule1F1B, 2, 3, **MIXED),
    in_turns("idle-aware, zero-bubble", zero_bubble, 4, 5, **AS_ON_GPUS),
    in_turns("idle-aware, two stages a rank", ScheduleInterleavedZeroBubble, 2, 4, n_chunks=2),
    in_turns("unequal stages", Schedule1F1B, 4, 5, layers=UNEQUAL, **CHECKPOINTED),
    packed("one packed row", Schedule1F1B, 4, 5, **CHECKPOINTED),
    packed("one packed row, two replicas, zero-bubble", zero_bubble, 2, 4),
    halved("cut in two", Schedule1F1B, 4, 5, layers=UNEQUAL, **CHECKPOINTED, **AS_ON_GPUS),
    halved("cut in two, weights later, two replicas, pool", split, 2, 4, **MIXED, **LATER),
    halved("cut in two, two stages a rank", ScheduleInterleavedZeroBubble, 2, 4, n_chunks=2),
    halved("cut in two, over replicas", Schedule1F1B, 2, 3, spans=True, layers=(1, 2)),
    replace(
        Case("unequal stages, documents over replicas, pool", Schedule1F1B, 2, 3, spans=True),
        **{"is_planned": True, "layers": (1, 2), **POOL, **AS_ON_GPUS},
    ),
    replace(
        in_turns("weights later, checkpointed", split, 4, 5, layers=UNEQUAL),
        **{**CHECKPOINTED, **AS_ON_GPUS, **LATER},
    ),
    packed("weights later, packed, two replicas", zero_bubble, 2, 4, **CHECKPOINTED, **LATER),
    replace(
        Case("weights later, two stages a rank", ScheduleInterleavedZeroBubble, 2, 4, n_chunks=2),
        **{**CHECKPOINTED, **LATER},
    ),
)
UNSERVED_CASES = (
    in_turns(
        "the first embeds", Schedule1F1B, 4, 4, layers=(0, 2, 2, 1), **CHECKPOINTED, **AS_ON_GPUS
    ),
    replace(
        in_turns("one of a rank embeds, one has windows, pool", ScheduleInterleaved1F1B, 2, 4),
        **{"n_chunks": 2, "layers": (0, 1, 2, 1), "windowed": (3,), **POOL},
    ),
    replace(
        halved("windows alone, weights later, cut in two", split, 2, 3),
        **{"layers": (2, 1), "windowed": (0,), **LATER},
    ),
)
"""Stages without a layer that is served, and ranks of such stages alone: they serve the others."""

SHARED_CASES = (
    *(
        Case(f"{how}, whole", Schedule1F1B, 2, 4, is_planned=True, replicated=how)
        for how in ("ddp", "fsdp")
    ),
    *(
        in_turns(f"{how}, in turns", Schedule1F1B, 2, 4, replicated=how, **CHECKPOINTED)
        for how in ("ddp", "fsdp")
    ),
    in_turns("fsdp, weights later", split, 2, 4, replicated="fsdp", **CHECKPOINTED, **LATER),
    # No forward comes between the backwards.
    in_turns("ddp, few microbatches", Schedule1F1B, 2, 2, replicated="ddp", **AS_ON_GPUS),
)
"""Replicas of stages share their gradients by DistributedDataParallel and by FSDP2, which must see
a microbatch's rows as one."""
N_LAYERS_A_CHUNK = 2
STEPS = 3

KILLS = (
    (1, "forward_one_chunk", 0),  # in warm-up, stages 2 and 3 idle
    (3, "backward_one_chunk", 1),  # in steady state
    (0, "backward_one_chunk", 5),  # in the drain, and the last server there is
)
DYING = Case("servers die", Schedule1F1B, 4, 6, kills=KILLS, **POOL)
DYING_CUT = replace(
    halved("servers die, cut in two", Schedule1F1B, 4, 6, kills=KILLS, **POOL),
    **{"layers": (3, 2, 2, 1), **AS_ON_GPUS},
)


def lengths_of(case: Case, step: int, replica: int) -> list[list[int]]:
    """Of documents by nano-batch, ``ROWS`` together in a microbatch; of whole rows where they are
    cut."""
    if case.is_cut:
        rows = ([ROWS], [3, ROWS - 4, 1], [7, 5, 2, ROWS - 14])
        return [rows[(step + i) % 3] for i in range(case.n_microbatches)]
    if case.is_packed:
        # A document that is alone leaves nothing for the second nano-batch.
        pairs = ([[ROWS], []], [[ROWS - 5], [4, 1]], [[7, 2], [ROWS - 9]])
        return [half for i in range(case.n_microbatches) for half in pairs[(step + i) % 3]]
    generator = torch.Generator().manual_seed(10 * step + replica)
    tokens = ROWS // case.n_rows
    found: list[list[int]] = []
    for _ in range(case.n_microbatches * case.n_rows):
        cuts = torch.randperm(tokens - 1, generator=generator)[: int(step % 3 + 1)] + 1
        ends = [0, *sorted(cuts.tolist()), tokens]
        found.append([b - a for a, b in itertools.pairwise(ends)])
    return found


def manifest_of(case: Case, step: int, rank: int) -> RankManifest:
    """Rank ``replica * p + r`` runs stage r; what spans replicas is one document of the same
    stage's."""
    replica, at = divmod(rank, case.n_pipeline_ranks)
    numbers = range(at * case.n_microbatches, (at + 1) * case.n_microbatches)
    length = ROWS * case.n_replicas
    nano_batches: list[Sequence[Segment]]
    if case.spans and case.is_cut:
        halves = in_halves(case.n_replicas, length)[replica].nano_batches
        nano_batches = [
            [replace(segment, document_id=number) for segment in segments]
            for number in numbers
            for segments in halves
        ]
    elif case.spans:
        nano_batches = [[Segment(number, length, replica * ROWS, ROWS)] for number in numbers]
    elif case.is_cut:
        rows = enumerate(lengths_of(case, step, replica), rank << 32)
        nano_batches = [half for i, row in rows for half in cut_in_two(row, first_id=i << 8)]
    else:
        return RankManifest.from_lengths(step, rank, lengths_of(case, step, replica))
    return RankManifest(step, rank, nano_batches)


def segments_of(manifest: RankManifest) -> list[Segment]:
    return [segment for segments in manifest.nano_batches for segment in segments]


def submitted(case: Case, session: Session) -> Iterator[tuple[int, torch.Tensor]]:
    """Steps whose manifests were handed in, and the positions of all their microbatches."""
    for step in range(STEPS):
        manifest = manifest_of(case, step, session.options.rank)
        session.submit(manifest)
        positions = [torch.arange(s.offset, s.offset + s.length) for s in segments_of(manifest)]
        yield step, torch.cat(positions).view(-1, case.microbatch_shape[1])


def ids_of(case: Case, step: int, replica: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + replica)
    n_rows, n_tokens = case.microbatch_shape
    size = case.n_microbatches * n_rows, n_tokens
    return torch.randint(VOCABULARY, size, generator=generator)


def documents(case: Case, step: int) -> list[torch.Tensor]:
    """The ids of each document of all replicas."""
    pieces: dict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for replica in range(case.n_replicas):
        segments = segments_of(manifest_of(case, step, replica * case.n_pipeline_ranks))
        rows = ids_of(case, step, replica).flatten().split([s.length for s in segments])
        for segment, ids in zip(segments, rows, strict=True):
            pieces[segment.document_id].append((segment.offset, ids))
    return [
        torch.cat([ids for _, ids in sorted(its, key=lambda piece: piece[0])])
        for its in pieces.values()
    ]


def reference(case: Case, model: Part, step: int) -> tuple[float, Part]:
    """The loss, and the whole model with gradients, of each document alone in one process."""
    whole = copy.deepcopy(model)
    whole.attend = alone
    total = sum((loss_of(whole(ids[None]), ids[None]) for ids in documents(case, step)),
                torch.zeros(()))  # fmt: skip
    total.backward()
    return float(total), whole


def kill_before(stage: PipelineStage, method: str, microbatch: int, pid: int) -> None:
    """Kills a process once, just before the stage runs the microbatch."""
    run = getattr(stage, method)

    def kill_and_run(chunk: int, *args: Any, **kwargs: Any) -> Any:
        if chunk == microbatch:
            setattr(stage, method, run)
            os.kill(pid, signal.SIGKILL)
        return run(chunk, *args, **kwargs)

    setattr(stage, method, kill_and_run)


def pipelining(case: Case, schedule: Any, parts: Sequence[Part]) -> Pipelining:
    """What the session needs to know of ``schedule``, with the seconds of these very stages."""

    def run(part: Part) -> torch.Tensor:
        shape = case.microbatch_shape
        if part.embed is not None:
            given = torch.zeros(shape, dtype=torch.int64)
        else:
            given = torch.zeros(*shape, WIDTH, requires_grad=True)
        output: torch.Tensor = part(given)
        return output

    order = schedule_of(schedule)
    seconds = measure_stages(
        {part.stage: (part, partial(run, part)) for part in parts}, case.n_stages, ROWS
    )
    assert all(parameter.grad is None for part in parts for parameter in part.parameters())
    return Pipelining(
        schedule=order,
        pipeline_ranks=tuple(rank % case.n_pipeline_ranks for rank in range(RANKS)),
        layers=case.served_layers,
        **seconds._asdict(),
    )


def run_case(
    case: Case,
    rank: int,
    folder: str,
    address: str,
    groups: list[Any],
    victims: Sequence[int] = (),
) -> None:
    replica, at = divmod(rank, case.n_pipeline_ranks)
    torch.manual_seed(0)
    model = Part(None, 0, [sum(case.layers_of_stages)])
    model.windowed = case.windowed_blocks
    own = [chunk * case.n_pipeline_ranks + at for chunk in range(case.n_chunks)]
    parts = [Part(model, index, case.layers_of_stages) for index in own]
    for part in parts:
        part.checkpointed, part.windowed = case.checkpointed, case.windowed_blocks
    replicas = None
    if case.replicated:
        mesh = init_device_mesh(
            "cpu", (case.n_replicas, case.n_pipeline_ranks), mesh_dim_names=("replica", "stage")
        )
        replicas = mesh["replica"]
    modules: list[nn.Module] = list(parts)
    if case.replicated == "ddp":
        assert replicas is not None
        modules = [
            DistributedDataParallel(part, process_group=replicas.get_group()) for part in parts
        ]
    stages = [
        PipelineStage(
            part,
            index,
            case.n_stages,
            torch.device("cpu"),
            group=groups[replica],
            dw_builder=defer_weights(part) if case.defers else None,
        )
        for index, part in zip(own, modules, strict=True)
    ]
    given = stages if case.n_chunks > 1 else stages[0]
    schedule = case.schedule(given, case.n_microbatches, loss_fn=loss_of, scale_grads=False)
    options = SessionOptions(
        control_plane=address,
        job=case.name.replace(" ", "-").replace(",", ""),
        rank=rank,
        n_ranks=RANKS,
        n_layers=case.most_layers,
        n_nano_batches=case.n_microbatches * case.n_rows,
        pipelining=pipelining(case, schedule, parts) if case.is_planned else None,
        shape=SHAPE,
        placement=case.placement,
        # Servers that die must have work.
        planner="random" if case.kills and not case.is_planned else "balanced",
        **on_this_host(Path(folder)),
    )
    if case.replicated == "fsdp":
        for part in parts:
            for block in part.blocks.values():
                fully_shard(block, mesh=replicas)
            fully_shard(part, mesh=replicas)
    with Session.open(options) as session:
        pipeline = Pipeline(session, *stages, meet_on_host=case.meets_on_host)
        for step, positions in submitted(case, session):
            for part in parts:
                part.zero_grad()
            for dying, method, microbatch in case.kills[step : step + 1]:
                if rank == dying:
                    kill_before(stages[0], method, microbatch, victims[step])
            ids = ids_of(case, step, replica)
            losses: list[torch.Tensor] = []
            with pipeline.step(step) as running:
                schedule.step(
                    *([ids] if at == 0 else []), target=ids, losses=losses, position_ids=positions
                )
            if case.kills:
                recoveries: list[Any] = [None] * RANKS
                dist.all_gather_object(recoveries, running.recoveries)
                assert max(recoveries) >= 1, f"step {step}: nobody noticed that a server died"
            check(case, model, parts, step, losses)


def check(
    case: Case, model: Part, parts: list[Part], step: int, losses: list[torch.Tensor]
) -> None:
    expected_loss, whole = reference(case, model, step)
    own = {
        name: parameter.grad.full_tensor()
        if isinstance(parameter.grad, DTensor)
        else parameter.grad
        for part in parts
        for name, parameter in part.named_parameters()
    }
    everybody: list[Any] = [None] * RANKS
    dist.all_gather_object(everybody, (float(sum(losses)), own))
    assert sum(loss for loss, _ in everybody) == pytest.approx(expected_loss, rel=1e-5), case.name
    for name, parameter in whole.named_parameters():
        # Replicas are summed; where they share gradients, each has their mean.
        gradient = sum(gradients[name] for _, gradients in everybody if name in gradients)
        assert parameter.grad is not None
        difference = (gradient - parameter.grad).abs().max() / parameter.grad.abs().max()
        # float32 through up to eight layers: some hundred roundings of 6e-8.
        assert difference < 2e-5, f"{case.name}, step {step}: {name} differs by {difference:.1e}"


def run_rank(
    rank: int, folder: str, address: str, cases: Sequence[Case], victims: Sequence[int] = ()
) -> None:
    with process_group(folder, rank, RANKS):
        pairs = [dist.new_group(list(range(first, first + 2))) for first in (0, 2)]
        everybody = [dist.new_group(list(range(RANKS)))]
        for case in cases:
            groups = everybody if case.n_replicas == 1 else pairs
            run_case(case, rank, folder, address, groups, victims)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "cases", [CASES, SHARED_CASES, UNSERVED_CASES], ids=["all", "shared gradients", "unserved"]
)
def test_pipelines_train_as_one_process_does(
    tmp_path: Path, pool_of_four: Cluster, cases: Sequence[Case]
) -> None:
    keep_profile(tmp_path, SHAPE)
    run_forked(run_rank, (str(tmp_path), pool_of_four.address, cases), RANKS)


@pytest.mark.parametrize("case", [DYING, DYING_CUT], ids=lambda case: case.name)
def test_servers_that_die_cost_no_step_of_a_pipeline(tmp_path: Path, case: Case) -> None:
    """In warm-up, steady state and drain, the last of them too: losses and gradients stay."""
    keep_profile(tmp_path, SHAPE)
    with cluster(tmp_path, len(case.kills), node_shape=SHAPE) as running:
        nodes = [process for process in running.processes if process is not running.control_plane]
        victims = [node.popen.pid for node in nodes]
        run_forked(run_rank, (str(tmp_path), running.address, [case], victims), RANKS)


class NoStage:
    """Anything else."""


def test_what_is_no_stage_is_refused() -> None:
    session: Any = None
    with pytest.raises(SessionError):
        Pipeline(session)
    with pytest.raises(SessionError):
        Pipeline(session, NoStage())
    stage: Any = SimpleNamespace(forward_one_chunk=print, stage_index=3, submod=None)
    session = SimpleNamespace(options=SimpleNamespace(pipelining=None, device="cpu"))
    Pipeline(session, stage)
    with pytest.raises(SessionError):
        Pipeline(session, stage)


def test_stages_of_another_rank_are_refused() -> None:
    stages = [SimpleNamespace(stage_index=index) for index in (0, 2)]
    _check_stages(stages, SCHEDULES["interleaved"](2, 2), 0, 4)
    for wrong, rank in ((stages, 1), (stages[::-1], 0)):
        with pytest.raises(SessionError):
            _check_stages(wrong, SCHEDULES["interleaved"](2, 2), rank, 4)


def test_a_microbatch_has_as_many_rows_as_nano_batches() -> None:
    module = nn.Linear(2, 2)
    run_rows_in_turns(module, 2)
    assert module(torch.zeros(3, 2)).shape == (3, 2)  # outside of microbatches
    with in_microbatch(0, 2), pytest.raises(SessionError):
        module(torch.zeros(3, 2))


def test_parts_of_a_packed_row_are_as_long_as_what_was_submitted() -> None:
    running: Any = SimpleNamespace(n_rows=[0, 3, 2, 4].__getitem__)
    token = current_step.set(running)
    try:
        cut = cut_of((torch.zeros(1, 3),), {}, 0, 2)
        assert (cut.first, cut.parts, cut.size) == (1, [RowPart(0, 3)], 3)
        row = torch.arange(6)[None]
        cut = cut_of((row, 7), {"ids": [row]}, 1, 2)
        assert (cut.first, cut.parts) == (0, [RowPart(0, 2), RowPart(2, 6)])
        (_, first), (args, named) = cut.calls((row, 7), {"ids": [row]})
        assert first["ids"][0].tolist() == [[0, 1]]
        assert args[0].tolist() == named["ids"][0].tolist() == [[2, 3, 4, 5]]
        assert args[1] == 7
        assert torch.equal(cut.joined([row[:, :2], row[:, 2:]]), row)
        with pytest.raises(SessionError):
            cut.calls((torch.zeros(1, 5),), {})
        with pytest.raises(SessionError):
            cut.joined([torch.zeros(1), torch.zeros(1)])
    finally:
        current_step.reset(token)


class Rows(NamedTuple):
    """What a stage takes and gives."""

    hidden: torch.Tensor
    scale: torch.Tensor


def test_named_tuples_and_numbers_of_a_microbatch() -> None:
    given = Rows(torch.arange(6).view(2, 3), torch.tensor(0.5))
    cut = cut_of((given.scale,), {"rows": given}, 0, 2)
    (_, first), ((scale,), second) = cut.calls((given.scale,), {"rows": given})
    assert isinstance(first["rows"], Rows)
    assert first["rows"].hidden.tolist() == [[0, 1, 2]]
    assert second["rows"].hidden.tolist() == [[3, 4, 5]]
    assert scale is second["rows"].scale is given.scale
    joined = cut.joined([Rows(part["rows"].hidden, torch.ones(1)) for part in (first, second)])
    assert isinstance(joined, Rows)
    assert torch.equal(joined.hidden, given.hidden)
    assert cut.joined([[given.hidden], [given.hidden]])[0].shape == (4, 3)


class Says:
    """Says in PyTorch's way what it runs."""

    def __init__(self, *orders: str) -> None:
        self.pipeline_order = {rank: order.split(",") for rank, order in enumerate(orders)}


def test_what_a_schedule_says_it_runs() -> None:
    said = schedule_of(Says("0F0,None,0B0,0REDUCE_GRAD", "1F0,1B0"))
    assert [list(map(str, said.order(rank))) for rank in range(2)] == [
        ["0F0", "0B0"],
        ["1F0", "1B0"],
    ]
    overlapping = schedule_of(Says("0F0,(0F1;0B0)OVERLAP_F_B,0B1"))
    assert list(map(str, overlapping.order(0))) == ["0F0", "0F1", "0B0", "0B1"]
    single: Any = type("Schedule1F1B", (Says,), {})
    assert schedule_of(single("0F0,0B0,0F1,0B1,0F2,0B2", "1F1,1F2")).n_microbatches == 3
    with pytest.raises(SessionError):
        schedule_of(object())
    with pytest.raises(ScheduleError):
        schedule_of(Says("0F0,0B0", "1B0,1F0"))


def test_errors_of_modules_come_out_of_stages_as_they_are() -> None:
    """PyTorch puts a RuntimeError in their place."""

    def forward_one_chunk(chunk: int) -> int:
        try:
            return [1][chunk]
        except IndexError as error:
            if chunk == 1:
                error.__cause__ = OSError("why")
                raise RuntimeError("[Stage 0] failed\n    to run forward") from error
            raise SessionError("mine") from error

    forward = _with_its_own_errors(forward_one_chunk)
    assert forward(0) == 1
    with pytest.raises(IndexError) as caught:
        forward(1)
    assert caught.value.__notes__ == ["[Stage 0] failed to run forward"]
    assert str(caught.value.__cause__) == "why"
    assert caught.value.__context__ is None
    with pytest.raises(SessionError):
        forward(2)


def test_a_nano_batch_is_chosen_in_a_step_only() -> None:
    with pytest.raises(SessionError), in_nano_batch(0):
        pass
