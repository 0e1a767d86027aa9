"""Jobs, their ranks and steps, as pure state: the time and the plans come from the test."""

from __future__ import annotations

import gc
import math
import tracemalloc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from control_plane.errors import InvalidRequestError
from control_plane.jobs.job import Job, kept_bytes
from control_plane.jobs.job_spec import JobPlacement, JobSpec, planning_options
from control_plane.jobs.jobs import REMEMBERED_CLOSED_JOBS, Jobs
from control_plane.jobs.publication import publish_step
from control_plane.jobs.rank_leases import Patience
from control_plane.jobs.same_documents import check_group
from control_plane.jobs.step import FailedStep, ReadyStep, StepRecord
from control_plane.planner.planning import PlanningOptions
from core_attention.ca_task import Phase
from core_attention.manifest import Manifest, RankManifest, Segment
from core_attention.pipelining import Pipelining
from core_attention.schedule_orders import SCHEDULES
from distca.contract.rpc_errors import Reason
from distca.v1.jobs_pb2 import RankMeasurement, ServerMeasurement
from tests.support.errors import fails
from tests.support.service_harness import (
    SHAPE,
    planning_server,
    rank_manifest,
    rotating_plan,
)

LEASE_SECONDS = 10.0


def spec(**changes: Any) -> JobSpec:
    values: dict[str, Any] = {
        "name": "train",
        "n_ranks": 2,
        "n_layers": 4,
        "n_nano_batches": 2,
        "shape": SHAPE,
        "placement": JobPlacement.POOL,
        "options": PlanningOptions(),
    }
    return JobSpec(**(values | changes))


@pytest.fixture
def jobs() -> Jobs:
    return Jobs(lease_seconds=LEASE_SECONDS, retained_steps=64, max_pending_steps=4)


@pytest.fixture
def job(jobs: Jobs) -> Job:
    """A job whose ranks 0 and 1 hold the leases L0 and L1."""
    job = jobs.create(spec(), job_id="train-1", key=b"t")
    for rank in (0, 1):
        job.join(rank, host=f"h{rank}", lease_id=f"L{rank}", now=0.0)
    return job


def test_a_job_is_freed_with_its_last_reference() -> None:
    """Manifests of a large job would stay until Python looks for circles."""
    job = Job("train-1", spec(), b"t", lease_seconds=9.0, retained_steps=4, max_pending_steps=4)
    held = weakref.ref(job)
    gc.disable()
    try:
        del job
        assert held() is None
    finally:
        gc.enable()


def submit(job: Job, rank: int, step: int, forward_only: bool = False, now: float = 0.0) -> None:
    job.submit(f"L{rank}", rank_manifest(step, rank), forward_only=forward_only, now=now)


def planned(step: int, server_ids: tuple[str, ...] = ("a", "b")) -> StepRecord:
    manifest = Manifest.merge([rank_manifest(step, rank) for rank in (0, 1)], 2)
    plan = rotating_plan(manifest, [*map(planning_server, server_ids)], SHAPE, PlanningOptions())
    return StepRecord(job_id="job", plan=plan, plan_seconds=0.1, forward_only=False)


def plan_next(job: Job, step: int) -> StepRecord:
    for rank in (0, 1):
        submit(job, rank, step)
    (ready,) = job.take_decided()
    assert isinstance(ready, ReadyStep)
    record = planned(step)
    job.planned(record)
    return record


def rank_measurement(rank: int) -> RankMeasurement:
    return RankMeasurement(rank=rank, step_seconds=2.0, wait_seconds=0.5, tokens=10)


def server_measurement(
    server_id: str, *seconds: float, backward_layers: tuple[int, ...] | None = None
) -> ServerMeasurement:
    return ServerMeasurement(
        server_id=server_id,
        forward_busy_seconds=seconds,
        backward_busy_seconds=seconds,
        backward_layers=(4,) * len(seconds) if backward_layers is None else backward_layers,
    )


def test_step_is_ready_when_all_ranks_have_handed_in_their_manifests(job: Job) -> None:
    submit(job, 1, 0)
    assert job.take_decided() == []
    assert job.pending_steps == {0: [0]}
    submit(job, 0, 0)
    assert job.take_decided() == [
        ReadyStep(
            step=0,
            manifests=(rank_manifest(0, 0), rank_manifest(0, 1)),
            forward_only=False,
        )
    ]
    assert job.take_decided() == []
    assert job.pending_steps == {}


def test_a_repeated_submission_changes_nothing_and_one_that_differs_is_refused(job: Job) -> None:
    """Before a step is planned, while it is, and afterwards."""
    for is_decided in (False, True, True):
        submit(job, 0, 0)
        submit(job, 0, 0)
        with pytest.raises(InvalidRequestError):
            submit(job, 0, 0, forward_only=True)
        if not is_decided:
            submit(job, 1, 0)
            assert len(job.take_decided()) == 1
        elif job.planned_step is None:
            job.planned(planned(0))
    assert job.take_decided() == []
    assert job.pending_steps == {}


def test_failed_step_may_be_submitted_again_and_differently(job: Job) -> None:
    for rank in (0, 1):
        submit(job, rank, 0)
    job.take_decided()
    job.failed(0)
    for rank in (0, 1):
        submit(job, rank, 0, forward_only=True)
    (ready,) = job.take_decided()
    assert isinstance(ready, ReadyStep)
    assert ready.forward_only


def test_disagreement_on_forward_only_fails_the_step(job: Job) -> None:
    submit(job, 0, 0)
    submit(job, 1, 0, forward_only=True)
    (failed,) = job.take_decided()
    assert isinstance(failed, FailedStep)
    assert job.pending_steps == {}


def test_pending_steps_are_bounded_and_room_comes_back(job: Job) -> None:
    for step in range(4):
        submit(job, 0, step)
    with fails(Reason.BACKLOG):
        submit(job, 0, 4)
    submit(job, 1, 0)
    job.take_decided()
    submit(job, 0, 4)


def test_leaving_rank_fails_the_steps_that_miss_it_and_those_that_come(job: Job) -> None:
    submit(job, 1, 5)
    assert job.leave("L0", error="", now=0.0) == 0
    assert job.closed is None
    submit(job, 1, 7)
    submit(job, 1, 6)
    assert [outcome.step for outcome in job.take_decided()] == [5, 6, 7]
    assert job.leave("L1", error="", now=0.0) == 1
    assert job.closed == ""


def test_last_joined_rank_closes_the_job_even_if_others_never_came(jobs: Jobs) -> None:
    job = jobs.create(spec(), job_id="j", key=b"")
    job.join(1, host="h", lease_id="L", now=0.0)
    job.leave("L", error="", now=1.0)
    assert job.closed == ""


def test_rank_leases_run_out_one_by_one(job: Job) -> None:
    job.leases.renew("L1", now=8.0)
    assert job.leases.gone(Patience(), now=10.0) == []
    assert [lease.rank for lease in job.leases.gone(Patience(), now=10.1)] == [0]
    with fails(Reason.LEASE_EXPIRED):
        job.leases.renew("L0", now=10.1)
    with fails(Reason.LEASE_EXPIRED):
        submit(job, 0, 0, now=10.1)
    assert [lease.rank for lease in job.leases.gone(Patience(), now=18.1)] == [0, 1]


BROKEN = Patience(broken_seconds=4.0, lost_seconds=1.0)


def gone(job: Job, patience: Patience, now: float) -> list[int]:
    return [lease.rank for lease in job.leases.gone(patience, now=now)]


@pytest.mark.parametrize("sign", ["renewal", "stream"])
def test_rank_whose_stream_broke_lives_if_it_is_heard(job: Job, sign: str) -> None:
    job.leases.stream_broken(1, now=1.0)
    if sign == "renewal":
        job.leases.renew("L1", now=2.0)
    else:
        job.leases.watched_by(1)
    assert gone(job, BROKEN, 9.0) == []


@pytest.mark.parametrize(
    ("told_at", "dead_after"),
    [(0.9, 1.0), (1.5, 1.0), (-9.0, 4.0), (None, 4.0)],
    ids=["just", "late", "old", "never"],
)
def test_rank_whose_stream_broke_is_waited_for_less_long_and_less_if_servers_lost_it_too(
    job: Job, told_at: float | None, dead_after: float
) -> None:
    job.leases.stream_broken(1, now=1.0)
    patience = BROKEN if told_at is None else replace(BROKEN, lost={1: told_at, 0: told_at})
    assert gone(job, patience, 1.0 + dead_after) == []
    # Rank 0 has its stream: whatever servers say, it lives. Nor does anybody without patience.
    assert gone(job, Patience(), 1.1 + dead_after) == []
    assert gone(job, patience, 1.1 + dead_after) == [1]


def test_rank_joins_once(job: Job) -> None:
    job.leases.watched_by(0)
    with fails(Reason.ALREADY_EXISTS):
        job.join(0, host="x", lease_id="X", now=1.0)
    with pytest.raises(InvalidRequestError):
        job.join(2, host="x", lease_id="X", now=1.0)
    job.leave("L0", error="", now=1.0)
    with fails(Reason.ALREADY_EXISTS):
        job.join(0, host="x", lease_id="X", now=1.0)


def test_recent_steps_are_kept_and_old_ones_may_even_be_submitted_anew(job: Job) -> None:
    for step in range(65):
        plan_next(job, step)
    assert job.planned_step == 64
    assert job.step(1).step == 1
    with fails(Reason.UNKNOWN_STEP):
        job.step(0)
    plan_next(job, 0)


def test_server_is_needed_until_it_or_all_ranks_have_reported(job: Job) -> None:
    for step in (0, 1, 2):
        plan_next(job, step)
    assert job.step_served_by("a") == 0
    assert job.step_served_by("stranger") is None
    job.report_server(0, server_measurement("a", 1.0, 1.0))
    assert job.step_served_by("a") == 1
    assert job.step_served_by("b") == 0
    job.report_rank("L0", 2, rank_measurement(0), now=0.0)
    assert job.step_served_by("b") == 0
    job.report_rank("L1", 1, rank_measurement(1), now=0.0)
    assert [record.step for record in job.unfinished_steps()] == [2]
    job.leave("L1", error="", now=0.0)
    assert job.step_served_by("b") is None


def test_server_without_a_task_is_not_needed(job: Job) -> None:
    job.planned(planned(0, tuple("abcdefghi")))
    assert job.step_served_by("g") == 0
    assert job.step_served_by("h") is None


def test_measured_imbalance_is_the_worst_nano_batch_and_needs_all_servers(job: Job) -> None:
    record = plan_next(job, 0)
    job.report_server(0, server_measurement("a", 1.0, 3.0))
    assert record.measured_imbalance(Phase.FORWARD) is None
    job.report_server(0, server_measurement("b", 1.0, 1.0))
    # max / mean: 1 / 1 in the first nano-batch, 3 / 2 in the second.
    assert record.measured_imbalance(Phase.FORWARD) == pytest.approx(1.5)


def test_measured_imbalance_counts_idle_servers(job: Job) -> None:
    record = planned(0, tuple("abcdefgh"))
    job.planned(record)
    assert record.serving == frozenset("abcdefg")
    for server_id in "abcdefg":
        job.report_server(0, server_measurement(server_id, 1.0, 1.0))
    assert record.measured_imbalance(Phase.BACKWARD) == pytest.approx(8 / 7)


@dataclass(frozen=True)
class Asked:
    """What a job answers to a rank that opens its name, by what has become of the job."""

    why: str
    answer: bool | Reason
    n_joined: int = 2
    broken: Sequence[int] = ()
    heard: bool = False
    has_left: bool = False
    rank: int = 0
    replace: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)


OTHER = {"n_layers": 9}

ASKED = [
    Asked("it lives", Reason.ALREADY_EXISTS),
    Asked("it is to be replaced", False, replace=True),
    Asked("its place is free", True, n_joined=1, rank=1),
    Asked("a process is gone", False, broken=[1]),
    Asked("only a stream broke", Reason.ALREADY_EXISTS, broken=[1], heard=True),
    Asked("its first start was killed while it gathered", False, n_joined=1, broken=[0], rank=1),
    Asked("it has left, others finish", False, has_left=True),
    Asked("another spec", Reason.SPEC_MISMATCH, changes=OTHER),
    Asked("another spec replaces", False, changes=OTHER, replace=True),
    Asked("other ranks of one start differ", Reason.SPEC_MISMATCH, 1, rank=1, changes=OTHER),
    Asked("nor with replace", Reason.SPEC_MISMATCH, 1, rank=1, changes=OTHER, replace=True),
    Asked("another spec after a kill", False, 1, [0], rank=1, changes=OTHER),
    Asked("another number of ranks after a kill", False, broken=[0], changes={"n_ranks": 3}),
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked.why)
def test_who_opens_the_name_of_a_job_joins_follows_or_is_refused(jobs: Jobs, asked: Asked) -> None:
    job = jobs.create(spec(), job_id="train-1", key=b"t")
    for rank in range(asked.n_joined):
        job.join(rank, host=f"h{rank}", lease_id=f"L{rank}", now=0.0)
        job.leases.watched_by(rank)
    for rank in asked.broken:
        job.leases.stream_broken(rank, now=1.0)
        if asked.heard:
            job.leases.renew(f"L{rank}", now=2.0)
    if asked.has_left:
        job.leave(f"L{asked.rank}", error="", now=1.0)

    def ask() -> bool:
        return job.has_place_for(spec(**asked.changes), asked.rank, replace=asked.replace)

    if isinstance(asked.answer, bool):
        assert ask() == asked.answer
    else:
        with fails(asked.answer):
            ask()


def test_a_rank_that_never_watched_gives_its_place_up(jobs: Jobs) -> None:
    job = jobs.create(spec(), job_id="train-1", key=b"t")
    for lease_id in ("lost", "L0"):
        assert job.has_place_for(spec(), 0, replace=False)
        job.join(0, host="h0", lease_id=lease_id, now=0.0)
    with fails(Reason.LEASE_EXPIRED):
        job.leases.renew("lost", now=1.0)
    job.leases.renew("L0", now=1.0)


def test_a_job_whose_ranks_are_to_come_back_makes_place(jobs: Jobs) -> None:
    job = jobs.create(spec(), job_id="train-1", key=b"", absent=frozenset({0, 1}), return_by=9.0)
    job.come_back(0, host="h0", lease_id="L0", now=1.0)
    assert not job.has_place_for(spec(), 1, replace=False)


def test_a_name_goes_to_the_last_of_its_jobs(jobs: Jobs) -> None:
    first, last = (jobs.create(spec(), job_id=f"train-{n}", key=b"") for n in (1, 2))
    assert jobs.named("train") is last
    jobs.close(last, "")
    assert jobs.named("train") is first
    assert jobs.named("other") is None


def test_closed_jobs_are_remembered_with_their_reason_up_to_a_bound(jobs: Jobs) -> None:
    for index in range(REMEMBERED_CLOSED_JOBS + 1):
        job = jobs.create(spec(name=f"n{index}"), job_id=f"j{index}", key=b"")
        jobs.close(job, f"reason {index}" if index else "")
    with fails(Reason.UNKNOWN_JOB, match="reason 1"):
        jobs.get("j1")
    with fails(Reason.UNKNOWN_JOB):
        jobs.get("j0")
    assert jobs.open_jobs() == []


@pytest.mark.parametrize(
    "changes", [{"name": "a/b"}, {"n_ranks": 0}, {"n_layers": 4097}, {"n_nano_batches": 257}]
)
def test_impossible_spec_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        spec(**changes)


def test_options_of_zero_tokens_are_the_defaults() -> None:
    options = planning_options(tolerance=0.0, min_forward_tokens=0, min_backward_tokens=7)
    assert options == PlanningOptions(tolerance=0.0, min_backward_tokens=7)
    with pytest.raises(InvalidRequestError):
        planning_options(tolerance=math.inf, min_forward_tokens=0, min_backward_tokens=0)


def test_differences_name_a_field_of_the_spec_or_of_its_pipelines() -> None:
    stages = two_stages(0, 1)
    own, others = spec(pipelining=stages), spec(pipelining=two_stages(0, 1, schedule="same-phase"))
    assert own.differences(own) == ""
    assert spec().differences(spec(n_layers=9)).startswith("n_layers ")
    assert own.differences(others).startswith("pipelining: schedule ")
    slower = replace(stages, forward_seconds=[1e-6, 3e-6])
    assert own.differences(spec(pipelining=slower)).startswith("pipelining: forward_seconds ")


def test_a_servers_speed_follows_what_it_measures(job: Job) -> None:
    record = plan_next(job, 0)
    twice_as_long = record.predicted_seconds(server_measurement("a", 0.0, 0.0), job.spec.n_layers)
    assert twice_as_long is not None
    job.report_server(0, server_measurement("a", twice_as_long, twice_as_long / 2))
    slower = job.speeds.of("a")
    assert slower < 1.0
    job.report_server(0, server_measurement("a", twice_as_long, twice_as_long))
    assert job.speeds.of("a") == slower, "a repeated report counts once"
    assert job.speeds.of("b") == 1.0


def test_ranks_hosts_are_known_once_all_have_joined(jobs: Jobs) -> None:
    job = jobs.create(spec(), job_id="train-2", key=b"t")
    job.join(1, host="b", lease_id="L1", now=0.0)
    assert job.leases.hosts is None
    job.join(0, host="a", lease_id="L0", now=0.0)
    assert job.leases.hosts == ("a", "b")
    job.leave("L1", error="", now=0.0)
    assert job.leases.hosts is None


def test_step_that_cannot_be_planned_again_has_no_plan_any_more(job: Job) -> None:
    plan_next(job, 0)
    job.recovery.call_for("a was lost", "a")
    job.begin_recovery(now=1.0)
    (ready,) = job.end_recovery()
    assert ready.begun
    job.failed(0)
    assert job.steps_to_tell() == []
    assert not job.names_server("a")
    with fails(Reason.UNKNOWN_STEP):
        job.step(0)
    for rank in (0, 1):
        submit(job, rank, 0)
    assert [decided.step for decided in job.take_decided()] == [0]


def test_manifests_of_finished_steps_are_not_waited_for(job: Job) -> None:
    plan_next(job, 3)
    for rank in (0, 1):
        job.report_rank(f"L{rank}", 3, rank_measurement(rank), now=0.0)
    assert job.take_finished() == 3
    assert job.take_finished() is None
    submit(job, 0, 2)
    assert job.pending_steps == {}


@pytest.fixture
def tensor_parallel(jobs: Jobs) -> Job:
    """Two replicas of two tensor-parallel ranks."""
    job = jobs.create(spec(name="tp", n_ranks=4), job_id="tp-1", key=b"t")
    for rank in range(4):
        group = (rank // 2 * 2, rank // 2 * 2 + 1)
        job.join(rank, host="h", lease_id=f"L{rank}", now=0.0, group=group)
    return job


def two_stages(*pipeline_ranks: int, schedule: str = "1f1b") -> Pipelining:
    return Pipelining(
        schedule=SCHEDULES[schedule](2, 2),
        pipeline_ranks=pipeline_ranks,
        layers=(4, 4),
        forward_seconds=(1e-6, 1e-6),
        backward_seconds=(2e-6, 2e-6),
    )


def is_planned(job: Job, step: int, *lengths: int) -> bool:
    """Whether a step can be planned whose ranks hold a document of one of ``lengths`` each."""
    for rank, length in enumerate(lengths):
        manifest = RankManifest.from_lengths(step, rank, [[length, 2], [4]])
        job.submit(f"L{rank}", manifest, forward_only=False, now=0.0)
    (decided,) = job.take_decided()
    return isinstance(decided, ReadyStep)


def test_ranks_of_a_tensor_parallel_group_hold_the_same_documents(tensor_parallel: Job) -> None:
    assert is_planned(tensor_parallel, 0, 3, 3, 5, 5)
    assert not is_planned(tensor_parallel, 1, 3, 3, 5, 6)
    assert is_planned(tensor_parallel, 1, 3, 3, 5, 5), "it may be submitted again"


def branching(step: int, rank: int, parent: int) -> RankManifest:
    """A document, and two that branch off one before them; ids are each rank's own."""
    first = rank << 32
    trunk, branch = Segment(first, 4, 0, 4), Segment(first + 1, 5, 3, 2, first, 3)
    return RankManifest(
        step, rank, [[trunk, branch, Segment(first + 2, 4, 2, 2, first + parent, 2)], []]
    )


def test_ranks_of_a_tensor_parallel_group_hold_the_same_trees(tensor_parallel: Job) -> None:
    for step, parents in enumerate(((0, 0, 1, 1), (0, 0, 0, 1))):
        for rank, parent in enumerate(parents):
            manifest = branching(step, rank, parent)
            tensor_parallel.submit(f"L{rank}", manifest, forward_only=False, now=0.0)
        (decided,) = tensor_parallel.take_decided()
        assert isinstance(decided, ReadyStep) == (step == 0)


def test_ranks_of_a_pipeline_hold_the_same_documents(jobs: Jobs) -> None:
    """Two replicas of two stages; which ranks are of one replica is not known."""
    stages = two_stages(0, 1, 0, 1)
    job = jobs.create(spec(name="pp", n_ranks=4, pipelining=stages), job_id="pp-1", key=b"t")
    for rank in range(4):
        job.join(rank, host="h", lease_id=f"L{rank}", now=0.0)
    for step, lengths in enumerate(((3, 3, 5, 5), (3, 5, 5, 3), (3, 3, 3, 3))):
        assert is_planned(job, step, *lengths)
    for lengths in ((3, 3, 5, 6), (3, 3, 5, 3)):
        assert not is_planned(job, 3, *lengths)


def test_tokens_that_several_ranks_hold_count_once(jobs: Jobs, tensor_parallel: Job) -> None:
    """Two replicas of two ranks; then of two stages, each of two tensor-parallel ranks."""
    stages = two_stages(*(0, 0, 1, 1) * 2)
    both = jobs.create(spec(name="4d", n_ranks=8, pipelining=stages), job_id="4d-1", key=b"t")
    for rank in range(8):
        group = (rank // 2 * 2, rank // 2 * 2 + 1)
        both.join(rank, host="h", lease_id=f"L{rank}", now=0.0, group=group)
    for job, n_ranks in ((tensor_parallel, 4), (both, 8)):
        record = planned(0)
        assert job.tokens_of(record) == 0
        record.ranks.update({rank: rank_measurement(rank) for rank in range(n_ranks)})
        assert job.tokens_of(record) == 2 * 10


def test_ranks_agree_on_their_tensor_parallel_group(jobs: Jobs) -> None:
    job = jobs.create(spec(name="tp", n_ranks=4), job_id="tp-1", key=b"t")
    job.join(0, host="h", lease_id="L0", now=0.0, group=(0, 1))
    for rank, group in ((1, ()), (1, (1, 0)), (2, (2, 1)), (3, (0, 3))):
        with fails(Reason.SPEC_MISMATCH):
            job.join(rank, host="h", lease_id="L", now=0.0, group=group)
    job.join(1, host="h", lease_id="L1", now=0.0, group=(0, 1))
    job.come_back(1, host="h", lease_id="M1", now=1.0, group=(0, 1))
    job.join(2, host="h", lease_id="L2", now=0.0)
    with fails(Reason.SPEC_MISMATCH):
        job.join(3, host="h", lease_id="L3", now=0.0, group=(2, 3))


def test_steps_fail_while_a_refused_rank_is_missing(jobs: Jobs) -> None:
    job = jobs.create(spec(n_ranks=3), job_id="train-1", key=b"t")
    for rank in (0, 1):
        job.join(rank, host="h", lease_id=f"L{rank}", now=0.0)
    submit(job, 0, 0)
    job.refused(1, "a second process says that it is rank 1, with 5 layers")
    assert job.take_decided() == []
    job.refused(2, "rank 2 has 5 layers")
    (failed,) = job.take_decided()
    assert isinstance(failed, FailedStep)
    job.join(2, host="h", lease_id="L2", now=0.0)
    for rank in (0, 1):
        submit(job, rank, 1)
    assert job.take_decided() == []


@pytest.mark.parametrize("group", [(1, 2), (0, 0), (0, 4)])
def test_a_group_that_cannot_be_is_refused(group: tuple[int, ...]) -> None:
    check_group(0, (), 4)
    check_group(0, (1, 0), 4)
    with pytest.raises(InvalidRequestError):
        check_group(0, group, 4)


def test_finished_steps_are_forgotten_for_new_ones_and_unfinished_are_not() -> None:
    of_a_step = 2 * kept_bytes(rank_manifest(0, 0))
    jobs = Jobs(
        lease_seconds=LEASE_SECONDS,
        retained_steps=64,
        max_pending_steps=4,
        max_manifest_bytes=4 * of_a_step,
    )
    job = jobs.create(spec(), job_id="train-1", key=b"t", owner="a")
    for rank in (0, 1):
        job.join(rank, host=f"h{rank}", lease_id=f"L{rank}", now=0.0)
    for step in range(2):
        plan_next(job, step)
        for rank in (0, 1):
            job.report_rank(f"L{rank}", step, rank_measurement(rank), now=0.0)
        assert job.take_finished() == step
    for step in (2, 3):
        plan_next(job, step)
    assert jobs.manifest_bytes("a") == 4 * of_a_step
    jobs.make_room("a", of_a_step)
    with fails(Reason.UNKNOWN_STEP):
        job.step(0)
    assert jobs.manifest_bytes("a") == 3 * of_a_step
    with fails(Reason.QUOTA):
        jobs.make_room("a", 2 * of_a_step)
    # The last finished one is shown to people, and the others run.
    assert [job.step(step).step for step in (1, 2, 3)] == [1, 2, 3]
    jobs.make_room("b", 4 * of_a_step)


def test_slices_that_come_to_more_than_their_manifests_are_counted(job: Job) -> None:
    plan_next(job, 0)
    counted = job.manifest_bytes
    assert job.more_bytes(0, counted) == 0
    job.keeps(0, job.more_bytes(0, counted + 1000))
    assert job.manifest_bytes == counted + 1000


def test_a_segment_comes_to_no_more_than_it_counts() -> None:
    """In documents of one token, whose plan has a task for each segment."""
    n = 20_000
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        manifest = RankManifest.from_lengths(0, 0, [[1] * n, [1] * n])
        ready = ReadyStep(step=0, manifests=(manifest,), forward_only=False)
        servers = [planning_server("a")]
        publication = publish_step("job", spec(n_ranks=1), ready, servers, rotating_plan)
        publication.record.rank_event(0)
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < kept_bytes(manifest)
