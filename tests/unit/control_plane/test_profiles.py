"""Which profile a job is planned with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from control_plane.jobs.profiles import profile_for
from core_attention.errors import ProfileError
from tests.support.service_harness import SHAPE, linear_profile


def test_profile_of_the_exact_shape_is_used_as_it_is() -> None:
    exact = linear_profile()
    other = linear_profile(replace(SHAPE, num_heads=16))
    assert profile_for([other, exact], SHAPE) is exact


def test_nearest_profile_is_scaled_by_flops() -> None:
    double = linear_profile(replace(SHAPE, num_heads=16))
    scaled = profile_for([double], SHAPE)
    assert scaled.shape == SHAPE
    np.testing.assert_array_equal(scaled.forward_seconds, double.forward_seconds / 2)
    np.testing.assert_array_equal(scaled.backward_seconds, double.backward_seconds / 2)


def test_dtype_comes_before_head_dim_and_head_dim_before_heads() -> None:
    other_dtype = linear_profile(replace(SHAPE, dtype="float32"))
    other_dim = linear_profile(replace(SHAPE, head_dim=128, head_dim_v=128))
    other_heads = linear_profile(replace(SHAPE, num_heads=64, num_heads_kv=1))
    assert profile_for([other_dtype, other_dim], SHAPE).forward_seconds[0, 0] == pytest.approx(
        other_dim.forward_seconds[0, 0] / 2
    )
    assert profile_for([other_dim, other_heads], SHAPE).forward_seconds[0, 0] == pytest.approx(
        other_heads.forward_seconds[0, 0] / 8
    )


def test_servers_with_one_profile_share_its_scaled_one() -> None:
    profile = linear_profile(replace(SHAPE, num_heads=16))
    assert profile_for([profile], SHAPE) is profile_for([profile], SHAPE)


def test_without_profiles_there_is_an_error() -> None:
    with pytest.raises(ProfileError):
        profile_for([], SHAPE)
