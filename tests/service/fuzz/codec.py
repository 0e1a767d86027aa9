"""What members decode of what they are sent: plans, manifests, jobs, profiles."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import numpy as np

from attention_node.served_job import JobDescription
from attention_node.tick_route import derive_tick_route
from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.ca_task import Phase
from core_attention.manifest import Manifest, RankManifest, Segment
from core_attention.plan import Plan, PlanServer
from core_attention.routing import derive_routes
from distca.contract.codec import (
    WireError,
    first_tick_from_bytes,
    plan_from_proto,
    plan_to_proto,
    profile_from_proto,
    profile_to_proto,
    rank_manifest_from_proto,
    rank_manifest_to_proto,
    shape_to_proto,
)
from distca.v1 import jobs_pb2, plan_pb2, profile_pb2
from tests.service.fuzz.mutation import mutated_raw, parsed
from tests.support.plan_slices import for_rank
from tests.support.service_harness import SHAPE, linear_profile, rotating_plan

N_RANKS, N_SERVERS, N_NANO_BATCHES = 3, 3, 2
N_PLANS = 64


def random_manifests(rng: random.Random, step: int) -> list[RankManifest]:
    """Documents in up to three pieces, each on any rank."""
    rows: list[list[list[Segment]]] = [[[] for _ in range(N_NANO_BATCHES)] for _ in range(N_RANKS)]
    for document in range(rng.randint(1, 6)):
        length, nano = rng.randint(1, 40), rng.randrange(N_NANO_BATCHES)
        cuts = sorted({0, length, *(rng.randint(0, length) for _ in range(rng.randrange(3)))})
        for begin, end in itertools.pairwise(cuts):
            segment = Segment(document, length, begin, end - begin)
            rows[rng.randrange(N_RANKS)][nano].append(segment)
    return [
        RankManifest(step, rank, tuple(tuple(nano) for nano in rows[rank]))
        for rank in range(N_RANKS)
    ]


def random_plan(rng: random.Random, *, step: int = 0, epoch: int = 0) -> Plan:
    """A valid plan, one of a few: to make one takes far longer than to decode it."""
    plan = _plan_number(rng.randrange(N_PLANS))
    return replace(plan, epoch=epoch, manifest=replace(plan.manifest, step=step))


@lru_cache(maxsize=N_PLANS)
def _plan_number(number: int) -> Plan:
    """A plan of a random manifest over three servers, one of them in-place."""
    rng = random.Random(number)
    servers: Sequence[PlanningServer] = [
        PlanningServer(
            server=PlanServer(f"server-{i}", 1 if i == 1 else None, f"host:{i}"),
            host=f"host-{i}",
            profile=linear_profile(),
        )
        for i in range(N_SERVERS)
    ]
    manifest = Manifest.merge(random_manifests(rng, 0), N_RANKS)
    return rotating_plan(manifest, servers, SHAPE, PlanningOptions())


class CodecTarget:
    """Every message that carries columns, decoded as a member does."""

    name = "codec"
    share = 0.25
    batch = 1000

    @contextmanager
    def fresh(self) -> Iterator[Callable[[random.Random], str]]:
        yield _case


def _case(rng: random.Random) -> str:
    kind = rng.choice((_plan, _plan, _plan, _rank_manifest, _profile, _job, _first_tick))
    try:
        return kind(rng)
    except WireError:
        return "refused"


def _plan(rng: random.Random) -> str:
    plan = random_plan(rng, step=rng.choice((0, 5, 2**40)))
    if rng.random() < 0.5:
        plan = for_rank(plan, rng.randrange(N_RANKS))
    raw = mutated_raw(plan_to_proto(plan, "job"), rng)
    message = parsed(plan_pb2.Plan, raw)
    if message is None:
        return "no message"
    _check_plan(plan_from_proto(message))
    return "valid"


def _check_plan(plan: Plan) -> None:
    """Whatever is accepted can be encoded again and routed, with every query sent once."""
    again = plan_from_proto(plan_to_proto(plan, "job"))
    assert plan_to_proto(again, "job") == plan_to_proto(plan, "job")
    manifest = plan.manifest
    for nano in np.unique(manifest.document_nano_batch).tolist():
        for phase in Phase:
            routes = derive_routes(manifest, plan.tasks(phase), nano)
            in_lane = manifest.document_nano_batch == nano
            assert sum(route.n_q_rows for route in routes.values()) == int(
                manifest.document_length[in_lane].sum()
            )
            for server in range(min(len(plan.servers), N_SERVERS)):
                derive_tick_route(plan, server, nano, phase, plan.servers[server].in_place_rank)


def _rank_manifest(rng: random.Random) -> str:
    manifest = random_manifests(rng, step=3)[rng.randrange(N_RANKS)]
    message = parsed(plan_pb2.RankManifest, mutated_raw(rank_manifest_to_proto(manifest), rng))
    if message is None:
        return "no message"
    decoded = rank_manifest_from_proto(message)
    assert rank_manifest_from_proto(rank_manifest_to_proto(decoded)) == decoded
    return "valid"


def _profile(rng: random.Random) -> str:
    raw = mutated_raw(profile_to_proto(linear_profile()), rng)
    message = parsed(profile_pb2.CostProfile, raw)
    if message is None:
        return "no message"
    profile = profile_from_proto(message)
    assert np.isfinite(profile.forward_seconds).all()
    assert (profile.forward_seconds > 0).all()
    return "valid"


def _job(rng: random.Random) -> str:
    spec = jobs_pb2.JobSpec(
        name="job", n_ranks=2, n_layers=2, n_nano_batches=2, shape=shape_to_proto(SHAPE)
    )
    opened = jobs_pb2.JobOpened(job_id="job", spec=spec, verification_key=bytes(32))
    message = parsed(jobs_pb2.JobOpened, mutated_raw(opened, rng))
    if message is None:
        return "no message"
    JobDescription.from_proto(message)
    return "valid"


def _first_tick(rng: random.Random) -> str:
    n_documents = rng.randrange(8)
    values = np.array([rng.choice((0, 1, 3, -1, 2**31 - 1)) for _ in range(n_documents)], np.int32)
    raw = values.tobytes()
    data = raw if rng.random() < 0.3 else raw[: rng.randrange(len(raw) + 1)]
    column = first_tick_from_bytes(data, n_documents)
    assert len(column) == n_documents
    assert (column >= 0).all()
    return "valid"
