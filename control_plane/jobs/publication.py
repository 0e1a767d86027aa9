"""Making one step's plan and cutting it into the slices that its members need.

Runs in a worker thread: it takes values and gives values, and touches no shared state.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from control_plane.jobs.job_spec import JobSpec
from control_plane.jobs.membership import Member
from control_plane.jobs.profiles import profile_for
from control_plane.jobs.step import ReadyStep, StepRecord
from control_plane.planner.planning import Planner, PlanningServer
from core_attention.arrays import Int64Array
from core_attention.errors import PlanError
from core_attention.manifest import Manifest
from core_attention.plan import PlanServer
from core_attention.shape import AttentionShape


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A planned step and what goes to whom.

    Attributes:
        record: the step with its whole plan.
        by_rank: the encoded event of every rank.
        by_server: the event of every pool server that has a task, by its id.
        plan_bytes: of all events together.
    """

    record: StepRecord
    by_rank: Mapping[int, bytes]
    by_server: Mapping[str, bytes]
    plan_bytes: int


def planning_servers(
    members: Sequence[Member],
    shape: AttentionShape,
    speeds: Mapping[str, float],
    *,
    in_place_receives: bool = True,
) -> list[PlanningServer]:
    """``members`` as a planner sees them, each with its best profile for ``shape`` and its
    correction from ``speeds``, by id.

    An in-place server that drains, or if ``in_place_receives`` is False any, keeps its own rank's
    tasks and receives no others.
    """
    return [
        PlanningServer(
            server=PlanServer(
                server_id=member.server_id,
                in_place_rank=member.in_place.rank if member.in_place else None,
                address=member.description.data_address,
            ),
            host=member.description.host,
            profile=profile_for(member.description.profiles, shape),
            speed=speeds.get(member.server_id, 1.0),
            capacity_rows=member.description.capacity_rows,
            receives=not member.draining and (in_place_receives or member.in_place is None),
        )
        for member in members
    ]


def publish_step(
    job_id: str,
    spec: JobSpec,
    ready: ReadyStep,
    servers: Sequence[PlanningServer],
    planner: Planner,
) -> Publication:
    """Plans a step and cuts the plan into slices.

    Raises:
        ManifestError: the manifests of the ranks do not fit together.
        PlanError: no plan can be made.
    """
    started = time.perf_counter()
    manifest = ready.whole_manifest(spec.n_ranks)
    plan = planner(manifest, servers, spec.shape, spec.options, epoch=ready.epoch)
    if plan.mask is not spec.shape.mask:
        raise PlanError(
            f"planner {plan.planner!r} planned for mask {plan.mask.name}, and the job's attention "
            f"is {spec.shape.mask.name}; leave planner at its default"
        )
    record = StepRecord(
        job_id=job_id,
        plan=plan,
        plan_seconds=time.perf_counter() - started,
        forward_only=ready.forward_only,
        first_tick=_first_tick(manifest, ready),
        speeds={server.server.server_id: server.speed for server in servers},
        sequences=ready.sequences,
    )
    by_rank = {
        rank: record.numbered(rank, event) for rank, event in enumerate(record.slicer.rank_events())
    }
    by_server = record.slicer.server_events()
    record.drop_slicer()
    plan_bytes = sum(map(len, (*by_rank.values(), *by_server.values())))
    return Publication(record=record, by_rank=by_rank, by_server=by_server, plan_bytes=plan_bytes)


def first_ticks(
    manifest: Manifest, complete_ticks: Sequence[Sequence[int]], left: Mapping[int, str]
) -> Int64Array:
    """``[n_documents]``: of the ranks that hold rows of a document, or carry its keys over from an
    earlier nano-batch, the least number of complete ticks in its lane.

    Args:
        manifest: of the whole step.
        complete_ticks: by rank, then nano-batch; of a rank in ``left``, all ticks of a lane.
        left: the ranks that have left the job or given the step up, and which, in words.
    """
    complete = np.array(complete_ticks, dtype=np.int64)
    held = manifest.held
    of_run = complete[held.rank, manifest.document_nano_batch[held.document]]
    first = np.full(manifest.n_documents, np.iinfo(np.int64).max)
    np.minimum.at(first, held.document, of_run)
    short = np.isin(held.rank, list(left))
    short &= of_run > first[held.document]
    if short.any():
        at = int(np.flatnonzero(short)[0])
        rank = int(held.rank[at])
        raise PlanError(
            f"rank {rank}'s rows of document "
            f"{manifest.document_id[held.document[at]]} are needed to run step "
            f"{manifest.step}, and rank {rank} {left[rank]}"
        )
    return first


def _first_tick(manifest: Manifest, ready: ReadyStep) -> Int64Array | None:
    if not ready.complete_ticks:
        return None
    first = first_ticks(manifest, ready.complete_ticks, ready.left)
    return first if first.any() else None
