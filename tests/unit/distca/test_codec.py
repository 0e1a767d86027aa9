"""Messages carry values there and back unchanged, and refuse what is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.arrays import int64_column
from core_attention.cost_model import CostProfile
from core_attention.manifest import (
    MAX_DOCUMENT_TOKENS,
    MAX_RANK_SEGMENTS,
    Manifest,
    RankManifest,
    Segment,
    SegmentColumns,
)
from core_attention.plan import PhaseForecast, Plan, PlanServer, SlotForecast
from core_attention.shape import AttentionShape
from distca.contract.codec import (
    MAX_RANK_MANIFEST_BYTES,
    WireError,
    plan_from_proto,
    plan_to_proto,
    profile_from_proto,
    profile_to_proto,
    rank_manifest_from_proto,
    rank_manifest_to_proto,
    shape_from_proto,
    shape_to_proto,
)
from distca.v1 import plan_pb2, profile_pb2
from tests.support.plan_slices import for_rank, for_server
from tests.support.planning_cases import assert_equal
from tests.support.service_harness import rotating_plan
from tests.support.strategies import plans, rank_manifests

SHAPE = AttentionShape(num_heads=8, num_heads_kv=2, head_dim=192, head_dim_v=128, dtype="float16")


def profile() -> CostProfile:
    return CostProfile(
        device="d",
        kernel="k",
        shape=SHAPE,
        q_tokens=int64_column([1, 64, 4096], "q"),
        kv_tokens=int64_column([1, 2**31], "kv"),
        forward_seconds=np.array([[1e-9, 2.0], [0.1, 3.0], [1 / 3, 4.0]]),
        backward_seconds=np.array([[1e-20, 2.0], [0.1, 3.0], [1e20 / 3, 4.0]]),
    )


def plan_of(manifests: list[RankManifest]) -> Plan:
    """Segments take turns on three servers."""
    servers = [
        PlanningServer(server=server, host="h", profile=profile())
        for server in (
            PlanServer("pool", None, "a:1"),
            PlanServer("zero", 0, "b:2"),
            PlanServer("last", 2, "c:3"),
        )
    ]
    manifest = Manifest.merge(manifests, len(manifests))
    return rotating_plan(manifest, servers, SHAPE, PlanningOptions(), epoch=3)


def two_ranks() -> list[RankManifest]:
    return [RankManifest.from_lengths(7, rank, [[10, 20], [30]]) for rank in (0, 1)]


def test_shape_and_profile_come_back_bit_for_bit() -> None:
    assert shape_from_proto(shape_to_proto(SHAPE)) == SHAPE
    assert_equal(profile_from_proto(profile_to_proto(profile())), profile())


@settings(max_examples=40)
@given(manifests=rank_manifests(), drawn=plans())
def test_rank_manifests_and_plans_come_back_unchanged(
    manifests: list[RankManifest], drawn: Plan
) -> None:
    for manifest in manifests:
        assert rank_manifest_from_proto(rank_manifest_to_proto(manifest)) == manifest
    slices = [for_rank(drawn, rank) for rank in range(drawn.manifest.n_ranks)]
    for plan in (drawn, for_server(drawn, "server-0"), *slices, plan_of(two_ranks())):
        message = plan_to_proto(plan, "job-1")
        assert message.job_id == "job-1"
        assert_equal(plan_from_proto(plan_pb2.Plan.FromString(message.SerializeToString())), plan)


def test_slots_come_back_unchanged_with_a_whole_plan() -> None:
    shape = (2, 5, 3)  # halves, slots, servers
    seconds = np.linspace(0, 1, 30).reshape(shape)
    slots = SlotForecast(
        home_seconds=np.full((2, 5, 2), 1 / 3), base_seconds=seconds / 3, seconds=seconds
    )
    plan = replace(plan_of(two_ranks()), slots=slots)
    message = plan_to_proto(plan, "j")
    assert_equal(plan_from_proto(message), plan)
    assert not plan_to_proto(for_rank(plan, 1), "j").HasField("slots")
    message.slots.seconds = message.slots.seconds[:-8]
    with pytest.raises(WireError):
        plan_from_proto(message)
    message.slots.seconds = slots.seconds[:, 1:].tobytes()
    with pytest.raises(WireError):
        plan_from_proto(message)
    message.slots.n_halves = 0
    with pytest.raises(WireError):
        plan_from_proto(message)


def test_equal_values_give_equal_bytes_whatever_the_layout_of_their_arrays() -> None:
    plan = plan_of(two_ranks())
    again = plan_of(list(reversed(two_ranks())))
    assert plan.forward_forecast is not None
    transposed = PhaseForecast(
        **{
            field.name: np.asfortranarray(getattr(plan.forward_forecast, field.name))
            for field in fields(PhaseForecast)
        }
    )
    object.__setattr__(again, "forward_forecast", transposed)
    first, second = (plan_to_proto(p, "j").SerializeToString() for p in (plan, again))
    assert first == second


def test_columns_are_little_endian_int32() -> None:
    message = rank_manifest_to_proto(RankManifest(0, 0, ((Segment(258, 7, 0, 7),),)))
    assert message.document_id == bytes([2, 1, 0, 0, 0, 0, 0, 0])
    assert message.length == bytes([7, 0, 0, 0])


def test_longest_document_fits_and_a_longer_one_is_refused() -> None:
    longest = RankManifest.from_lengths(0, 0, [[MAX_DOCUMENT_TOKENS]])
    assert rank_manifest_from_proto(rank_manifest_to_proto(longest)) == longest
    longer = RankManifest.from_lengths(0, 0, [[MAX_DOCUMENT_TOKENS + 1]])
    with pytest.raises(WireError):
        rank_manifest_to_proto(longer)


@pytest.mark.parametrize(
    "segment",
    [
        Segment(9, 10, 0, 0),
        Segment(9, 10, 0, 11),
        Segment(9, 10, -1, 5),
        Segment(9, 10, 6, 5),
        Segment(9, 0, 0, 1),
        Segment(9, 10, 4, 5, 8, 5),
        Segment(9, 10, 9, 1, 8, -1),
    ],
)
def test_segments_outside_their_document_are_refused(segment: Segment) -> None:
    message = rank_manifest_to_proto(RankManifest(0, 0, ((segment,),)))
    with pytest.raises(WireError):
        rank_manifest_from_proto(message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nano_batch", b"\0" * 7),
        ("document_id", b"\0" * 12),
        ("offset", b""),
        ("nano_batch", b"\2\0\0\0" * 3),
        ("n_nano_batches", 0),
        ("n_nano_batches", 257),
        ("step", 2**63),
    ],
)
def test_broken_rank_manifest_is_refused(field: str, value: Any) -> None:
    message = rank_manifest_to_proto(two_ranks()[0])
    setattr(message, field, value)
    with pytest.raises(WireError):
        rank_manifest_from_proto(message)


def short_documents(n: int) -> RankManifest:
    one = np.ones(n, dtype=np.int64)
    columns = SegmentColumns(one - 1, np.arange(n), one, one - 1, one, one, one - 1)
    return RankManifest.from_columns(0, 0, 1, columns)


def test_a_rank_with_too_many_segments_is_refused_on_both_sides() -> None:
    most = rank_manifest_to_proto(short_documents(MAX_RANK_SEGMENTS))
    assert len(rank_manifest_from_proto(most).columns.length) == MAX_RANK_SEGMENTS
    assert most.ByteSize() < MAX_RANK_MANIFEST_BYTES + 64
    with pytest.raises(WireError):
        rank_manifest_to_proto(short_documents(MAX_RANK_SEGMENTS + 1))
    wide = (("document_id", 8), ("document_parent", 8), ("document_offset", 4))
    for field, width in (*wide, ("nano_batch", 4), ("document_length", 4)):
        setattr(most, field, getattr(most, field) + bytes(width))
    most.offset += bytes(4)
    most.length += b"\1\0\0\0"
    with pytest.raises(WireError):
        rank_manifest_from_proto(most)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("manifest.segment_row", b"\0"),
        ("manifest.segment_row", b""),
        ("manifest.document_length", b"\0" * 24),
        ("manifest.n_ranks", 1),
        ("manifest.step", 2**64 - 1),
        ("forward.q_end", b"\0" * 3),
        ("backward.server", b""),
        ("backward.server", b"\3\0\0\0" * 6),
        ("backward.q_end", b"\1\0\0\0" * 6),
        ("mask", 0),
        ("mask", 77),
        ("forward_forecast.seconds", b"\0" * 8),
        ("backward_forecast.q_rows", b"\0" * 9),
    ],
)
def test_broken_plan_is_refused(path: str, value: Any) -> None:
    message = plan_to_proto(plan_of(two_ranks()), "j")
    *parents, field = path.split(".")
    target: Any = message
    for parent in parents:
        target = getattr(target, parent)
    setattr(target, field, value)
    with pytest.raises(WireError):
        plan_from_proto(message)


def test_broken_server_of_a_plan_is_refused() -> None:
    message = plan_to_proto(plan_of(two_ranks()), "j")
    message.servers[1].in_place_rank = -2
    with pytest.raises(WireError):
        plan_from_proto(message)
    message.servers[1].in_place_rank = 0
    message.servers[1].server_id = "pool"
    with pytest.raises(WireError):
        plan_from_proto(message)


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (shape_from_proto, profile_pb2.AttentionShape()),
        (profile_from_proto, profile_pb2.CostProfile()),
        (plan_from_proto, plan_pb2.Plan()),
        (rank_manifest_from_proto, plan_pb2.RankManifest()),
    ],
)
def test_empty_messages_are_refused(decode: Callable[[Any], object], message: Any) -> None:
    with pytest.raises(WireError):
        decode(message)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda message: message.backward_seconds.pop(),
        lambda message: message.q_tokens.__setitem__(0, 2),
        lambda message: setattr(message.shape, "dtype", "int8"),
    ],
)
def test_profile_whose_values_do_not_fit_is_refused(spoil: Callable[[Any], object]) -> None:
    message = profile_to_proto(profile())
    spoil(message)
    with pytest.raises(WireError):
        profile_from_proto(message)
