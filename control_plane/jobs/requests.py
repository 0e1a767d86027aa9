"""From the messages of ``proto/distca/v1`` to the control plane's own types, and back."""

from __future__ import annotations

from functools import lru_cache

from google.protobuf.message import Message

from control_plane.errors import InvalidRequestError, RefusedError
from control_plane.jobs.job import Job
from control_plane.jobs.job_spec import JobPlacement, JobSpec, planning_options
from control_plane.jobs.membership import Member, ServerDescription
from control_plane.jobs.open_step import HandIn
from control_plane.jobs.profiles import nominal_profile
from control_plane.jobs.step import StepRecord
from core_attention.ca_task import Phase
from core_attention.cost_model import CostProfile
from core_attention.manifest import RankManifest
from distca.contract.codec import (
    NO_RANK,
    WireError,
    pipelining_from_proto,
    pipelining_to_proto,
    profile_from_proto,
    rank_manifest_from_proto,
    shape_from_proto,
    shape_to_proto,
)
from distca.contract.identity import in_place_server_id
from distca.process.plain_text import MAX_REASON_CHARACTERS, plain
from distca.v1 import jobs_pb2, membership_pb2, plan_pb2, profile_pb2

MAX_FIRST_STEP = 2**62
"""Numbers that a rank may ask for are below: there are others behind them."""


def description_from_proto(
    message: membership_pb2.ServerDescription, *, default_profile: CostProfile | None = None
) -> ServerDescription:
    """The server in ``message``; ``default_profile`` is that of a server that has none."""
    try:
        profiles = tuple(
            _interned(p.SerializeToString(deterministic=True)) for p in message.profiles
        )
    except WireError as error:
        raise InvalidRequestError(f"server {message.server_id!r}: {error}") from error
    if not profiles and default_profile is not None:
        profiles = (default_profile,)
    return ServerDescription(
        server_id=message.server_id,
        data_address=message.data_address,
        host=message.host,
        device=message.device,
        memory_bytes=message.memory_bytes,
        capacity_rows=message.capacity_rows or None,
        profiles=profiles,
        version=message.version,
        transport=message.transport,
    )


def status_to_proto(
    member: Member, *, seconds_since_heartbeat: float, with_address: bool
) -> membership_pb2.ServerStatus:
    """A server as ``DescribeCluster`` shows it, without its profiles."""
    about = member.description
    return membership_pb2.ServerStatus(
        server=membership_pb2.ServerDescription(
            server_id=about.server_id,
            data_address=about.data_address if with_address else "",
            host=about.host,
            device=about.device,
            memory_bytes=about.memory_bytes,
            capacity_rows=about.capacity_rows or 0,
            version=about.version,
            transport=about.transport,
        ),
        load=member.load,
        draining=member.draining,
        seconds_since_heartbeat=seconds_since_heartbeat,
        in_place_job_id=member.in_place.job_id if member.in_place else "",
        in_place_rank=member.in_place.rank if member.in_place else NO_RANK,
    )


def spec_from_proto(message: jobs_pb2.JobSpec) -> JobSpec:
    """The job spec in ``message``."""
    if message.placement not in {placement.value for placement in JobPlacement}:
        valid = ", ".join(f"{p.value} ({p.name})" for p in JobPlacement)
        raise InvalidRequestError(
            f"job {message.name!r}: placement is {message.placement}; valid are {valid}"
        )
    try:
        shape = shape_from_proto(message.shape)
        pipelining = (
            pipelining_from_proto(message.pipelining) if message.HasField("pipelining") else None
        )
    except WireError as error:
        raise InvalidRequestError(f"job {message.name!r}: {error}") from error
    return JobSpec(
        name=message.name,
        n_ranks=message.n_ranks,
        n_layers=message.n_layers,
        n_nano_batches=message.n_nano_batches,
        shape=shape,
        placement=JobPlacement(message.placement),
        options=planning_options(
            tolerance=message.tolerance,
            min_forward_tokens=message.min_forward_tokens,
            min_backward_tokens=message.min_backward_tokens,
        ),
        planner=message.planner,
        softmax_scale=message.softmax_scale,
        checksums=message.checksums if message.HasField("checksums") else None,
        transport=message.transport,
        pipelining=pipelining,
        head_groups=message.head_groups or 1,
        windows=tuple(message.windows),
    )


def spec_to_proto(spec: JobSpec) -> jobs_pb2.JobSpec:
    """The message of ``spec``, defaults filled in."""
    message = jobs_pb2.JobSpec(
        name=spec.name,
        n_ranks=spec.n_ranks,
        n_layers=spec.n_layers,
        n_nano_batches=spec.n_nano_batches,
        shape=shape_to_proto(spec.shape),
        placement=f"PLACEMENT_{spec.placement.name}",
        tolerance=spec.options.tolerance,
        planner=spec.planner,
        softmax_scale=spec.scale,
        transport=spec.transport,
        min_forward_tokens=spec.options.min_forward_tokens,
        min_backward_tokens=spec.options.min_backward_tokens,
        pipelining=pipelining_to_proto(spec.pipelining) if spec.pipelining else None,
        head_groups=spec.head_groups,
        windows=spec.windows,
    )
    if spec.checksums is not None:
        message.checksums = spec.checksums
    return message


def in_place_server_from_proto(
    request: jobs_pb2.OpenJobRequest, spec: JobSpec
) -> ServerDescription | None:
    """The in-place server of a rank that opens a job. If the placement is POOL it stands by, and
    may come without a profile.
    """
    if not request.HasField("in_place_server"):
        if spec.placement.uses_in_place:
            raise InvalidRequestError(
                f"job {spec.name}, rank {request.rank}: in_place_server is missing; it must be "
                f"given, since the placement is {spec.placement.name}"
            )
        return None
    server = request.in_place_server
    expected = in_place_server_id(spec.name, request.rank)
    if server.server_id != expected:
        # Else a job could take the name of a pool server, or of another job's rank.
        raise InvalidRequestError(
            f"job {spec.name}, rank {request.rank}: in_place_server is called "
            f"{server.server_id!r}; it must be {expected!r}"
        )
    if spec.placement.uses_in_place or server.profiles:
        return description_from_proto(server)
    return description_from_proto(server, default_profile=nominal_profile(spec.shape))


def manifest_from_proto(message: plan_pb2.RankManifest) -> RankManifest:
    """The manifest in ``message``."""
    try:
        return rank_manifest_from_proto(message)
    except WireError as error:
        raise InvalidRequestError(str(error)) from error


def rounds_of(joining: jobs_pb2.Joining) -> tuple[int | None, int | None]:
    """The round that a rank's hand-in is in, and the rounds whose last forward the rank has begun;
    None if it does not know."""
    if not joining.HasField("round"):
        return None, None
    return joining.round, joining.round + joining.closes_round


def hand_in_from_proto(message: jobs_pb2.HandIn, manifest: RankManifest, now: float) -> HandIn:
    """The hand-in of ``manifest``, which has come now."""
    joining = message.joining
    if joining.first_step >= MAX_FIRST_STEP:
        raise InvalidRequestError(
            f"joining.first_step is {joining.first_step}; valid are 0 to {MAX_FIRST_STEP - 1}"
        )
    in_round, closed = rounds_of(joining)
    return HandIn(
        sequence=joining.sequence,
        manifest=manifest,
        forward_only=message.forward_only,
        turns=joining.turns or 1,
        first_step=joining.first_step,
        open_places=frozenset(joining.open_places),
        is_awaited=joining.awaited,
        round=in_round if joining.awaited else closed,
        since=now,
    )


def opened_event(job: Job, *, to_server: bool) -> bytes:
    """The event that announces ``job``; a server learns how to check tokens."""
    return _event(
        job_opened=jobs_pb2.JobOpened(
            job_id=job.job_id,
            spec=spec_to_proto(job.spec),
            verification_key=job.key if to_server else b"",
            owner=job.owner if to_server else "",
        )
    )


def failed_event(job: Job, step: int, error: str, *, sequence: int) -> bytes:
    """The event for a ``step`` that has no plan, to a rank of which it is the hand-in
    ``sequence``."""
    return _event(
        step_failed=jobs_pb2.StepFailed(
            job_id=job.job_id, step=step, error=error, sequence=sequence
        )
    )


def refused_event(message: jobs_pb2.HandIn, error: RefusedError) -> bytes:
    """A hand-in is not taken."""
    numbered = message.joining.numbered
    return _event(
        hand_in_refused=jobs_pb2.HandInRefused(
            step=message.manifest.step,
            sequence=0 if numbered else message.joining.sequence,
            kind=error.reason.kind,
            error=plain(str(error), MAX_REASON_CHARACTERS),
        )
    )


def recover_event(job: Job) -> bytes:
    """The event that makes all plans of ``job`` before its epoch void."""
    return _event(
        recover=jobs_pb2.Recover(
            job_id=job.job_id,
            epoch=job.epoch,
            lost_server_ids=job.recovery.lost,
            reason="; ".join(job.recovery.reasons),
        )
    )


def finished_event(job: Job, step: int) -> bytes:
    """The event that all ranks have finished ``step`` and those before."""
    return _event(step_finished=jobs_pb2.StepFinished(job_id=job.job_id, step=step))


def closed_event(job: Job) -> bytes:
    """The event that ``job`` is closed."""
    return _event(job_closed=jobs_pb2.JobClosed(job_id=job.job_id, error=job.closed or ""))


def _event(**kind: Message) -> bytes:
    return jobs_pb2.PlanEvent(**kind).SerializeToString()  # type: ignore[arg-type]


def description_of_job(job: Job) -> jobs_pb2.DescribeJobResponse:
    """A job's state, for people."""
    return jobs_pb2.DescribeJobResponse(
        spec=spec_to_proto(job.spec),
        joined_ranks=job.leases.joined,
        pending_steps=[
            jobs_pb2.PendingStep(step=step, missing_ranks=missing)
            for step, missing in job.pending_steps.items()
        ],
        planned_step=-1 if job.planned_step is None else job.planned_step,
        away_ranks=job.leases.away,
        last_step=last_step_to_proto(job),
    )


def last_step_to_proto(job: Job) -> jobs_pb2.StepStatus | None:
    """The last step that every rank has finished, if it is still known and was measured."""
    try:
        record = job.step(job.finished_step)
    except RefusedError:
        return None
    if not (ranks := record.ranks.values()):
        return None
    phases = [(phase, record.plan.forecast(phase)) for phase in record.phases]
    moved = [int(each.bytes_in.sum() + each.bytes_out.sum()) for _, each in phases if each]
    return jobs_pb2.StepStatus(
        step=record.step,
        step_seconds=max(rank.step_seconds for rank in ranks),
        wait_seconds=record.longest_wait_seconds,
        tokens=job.tokens_of(record),
        moved_bytes=sum(moved) * job.spec.n_layers,
        phases=[_phase_to_proto(record, phase) for phase in record.phases],
    )


def _phase_to_proto(record: StepRecord, phase: Phase) -> jobs_pb2.PhaseStatus:
    return jobs_pb2.PhaseStatus(
        phase=phase.value,
        home_imbalance=record.plan.home_imbalance(phase) or 0.0,
        predicted_imbalance=record.plan.predicted_imbalance(phase) or 0.0,
        measured_imbalance=record.measured_imbalance(phase) or 0.0,
        busy_seconds=record.mean_busy_seconds(phase),
    )


def step_to_proto(record: StepRecord, plan: plan_pb2.Plan) -> jobs_pb2.GetStepResponse:
    """A step with its encoded whole plan and what was measured, by server id and by rank."""
    return jobs_pb2.GetStepResponse(
        plan=plan,
        plan_seconds=record.plan_seconds,
        servers=[record.servers[server_id] for server_id in sorted(record.servers)],
        ranks=[record.ranks[rank] for rank in sorted(record.ranks)],
    )


# Servers of one kind register equal profiles; they share one object, which is what planners and
# the cache of scaled profiles go by.
@lru_cache(maxsize=1024)
def _interned(profile: bytes) -> CostProfile:
    return profile_from_proto(profile_pb2.CostProfile.FromString(profile))
