"""Cost profiles: exact on the grid, sensible between its points, strict about their content."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase, causal_qk_pairs
from core_attention.cost_model import CostProfile
from core_attention.errors import ProfileError
from core_attention.shape import AttentionShape

SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=64, head_dim_v=64, dtype="float32")
Q = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
KV = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096])
OVERHEAD_SECONDS, PAIR_SECONDS = 20e-6, 2e-9


def pairs(q: ArrayLike, kv: ArrayLike) -> Int64Array:
    q, kv = np.asarray(q), np.asarray(kv)
    return causal_qk_pairs(kv - q, kv)


def seconds_of_a_simple_device(q: ArrayLike, kv: ArrayLike) -> Float64Array:
    """A fixed overhead and a fixed rate."""
    return np.asarray(OVERHEAD_SECONDS + PAIR_SECONDS * pairs(q, kv), dtype=np.float64)


def profile() -> CostProfile:
    q, kv = Q[:, None], np.maximum(KV[None, :], Q[:, None])
    forward = seconds_of_a_simple_device(q, kv)
    return CostProfile(
        device="a device",
        kernel="cpu",
        shape=SHAPE,
        q_tokens=Q,
        kv_tokens=KV,
        forward_seconds=forward,
        backward_seconds=3 * forward,
    )


def test_exact_on_grid_points() -> None:
    cost = profile()
    q, kv = (axis.ravel() for axis in np.meshgrid(Q, KV, indexing="ij"))
    task = kv >= q
    for phase, table in (
        (Phase.FORWARD, cost.forward_seconds),
        (Phase.BACKWARD, cost.backward_seconds),
    ):
        got = cost.seconds(q[task], kv[task], phase)
        np.testing.assert_allclose(got, table.ravel()[task], rtol=1e-12)


@given(st.integers(1, 1024), st.integers(0, 3072))
def test_close_to_overhead_plus_rate_between_grid_points(q: int, before: int) -> None:
    kv = q + before
    expected = float(seconds_of_a_simple_device(q, kv))
    got = float(profile().seconds(q, kv, Phase.FORWARD))
    # Where a task is all overhead its rate falls like 1 / pairs, and is interpolated up to 6% too
    # high in each of q and kv; the cells that the diagonal cuts are off by more, either way: -12%
    # to +22% in a search over 20,000 tasks. The median over them is 0.4%.
    assert 0.87 * expected <= got <= 1.23 * expected


def test_beyond_the_grid_the_nearest_rate_holds() -> None:
    cost = profile()
    rate = cost.seconds(1024, 4096, Phase.FORWARD) / pairs(1024, 4096)
    far = cost.seconds(5000, 100_000, Phase.FORWARD)
    assert far == pytest.approx(rate * pairs(5000, 100_000))


def test_arrays_broadcast_and_no_queries_take_no_time() -> None:
    cost = profile()
    got = cost.seconds(np.array([[0], [3]]), np.array([3, 10, 100]), Phase.BACKWARD)
    assert got.shape == (2, 3)
    assert (got[0] == 0).all()
    one_by_one = [float(cost.seconds(3, kv, Phase.BACKWARD)) for kv in (3, 10, 100)]
    assert got[1].tolist() == one_by_one


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 5e-324, 1e300])
@pytest.mark.parametrize("name", ["forward_seconds", "backward_seconds"])
def test_holes_are_refused(name: str, value: float) -> None:
    table: Any = np.array(getattr(profile(), name))
    table[3, 5] = value
    with pytest.raises(ProfileError):
        replace(profile(), **{name: table})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q_tokens", [2, 4]),
        ("kv_tokens", [1, 4, 4]),
        ("kv_tokens", [1]),
        ("kv_tokens", [1.5, 2]),
        ("kv_tokens", [1, 2**33]),
        ("forward_seconds", np.ones((10, 13))),
        ("forward_seconds", [["x"]]),
        ("forward_seconds", [[1.0], [1.0, 2.0]]),
    ],
)
def test_a_broken_grid_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ProfileError):
        replace(profile(), **{name: value})


def test_json_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "profile.json"
    profile().save(path)
    loaded = CostProfile.load(path)
    assert (loaded.device, loaded.kernel, loaded.shape) == ("a device", "cpu", SHAPE)
    for name in ("q_tokens", "kv_tokens", "forward_seconds", "backward_seconds"):
        assert np.array_equal(getattr(loaded, name), getattr(profile(), name)), name
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]


def altered(**changes: object) -> str:
    fields = json.loads(profile().to_json()) | changes
    return json.dumps({name: value for name, value in fields.items() if value != "absent"})


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "3",
        "[" * 100_000,
        '{"version": "\xff"}',
        altered(version="absent"),
        altered(version=99),
        altered(shape={"num_heads": 1}),
        altered(kernel="absent"),
        altered(q_tokens=["a", "b"]),
        altered(forward_seconds=[[None]]),
    ],
)
def test_what_is_no_profile_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ProfileError):
        CostProfile.load(path)
