"""What segments take at home: the profile's seconds, whether their rates are in a table or not."""

from __future__ import annotations

import numpy as np
import pytest

from control_plane.planner.costs import BACKWARD, FORWARD, UNCUT_TOKENS
from control_plane.planner.fleet import build_fleet
from control_plane.planner.planning import PlanningServer
from control_plane.planner.survey import nano_batches, survey
from core_attention.ca_task import Phase
from tests.support.planning_cases import PROFILE, in_place, stream_manifest, uniform_profile

LENGTHS = [UNCUT_TOKENS - 1, UNCUT_TOKENS, 3 * UNCUT_TOKENS, 1, 700, 5000, 2 * UNCUT_TOKENS + 77]
SPEEDS = [1.0, 0.4, 0.0, 3.0]
PROFILES = [PROFILE, PROFILE, PROFILE, uniform_profile()]


@pytest.mark.parametrize(("span", "n_nano_batches"), [(False, 1), (True, 1), (False, 2)])
def test_seconds_are_the_profiles_at_each_homes_speed(span: bool, n_nano_batches: int) -> None:
    manifest = stream_manifest(LENGTHS, 4, span=span, n_nano_batches=n_nano_batches)
    servers = [
        PlanningServer(server=s.server, host=s.host, profile=profile, speed=speed)
        for s, profile, speed in zip(in_place(4), PROFILES, SPEEDS, strict=True)
    ]
    found = survey(manifest, build_fleet(servers, 4))
    begin, rank = manifest.segment_offset, manifest.segment_rank
    end = begin + manifest.segment_length
    nano = manifest.document_nano_batch[manifest.segment_document]
    np.testing.assert_array_equal(found.end, end)
    np.testing.assert_array_equal(
        found.whole,
        manifest.segment_length == manifest.document_length[manifest.segment_document],
    )
    for phase, index in ((Phase.FORWARD, FORWARD), (Phase.BACKWARD, BACKWARD)):
        # A server of speed 0 counts with speed 1: somebody must do its work.
        expected = np.array(
            [
                PROFILES[r].seconds(q_end - q_begin, q_end, phase) / (SPEEDS[r] or 1.0)
                for q_begin, q_end, r in zip(begin, end, rank, strict=True)
            ]
        )
        np.testing.assert_allclose(found.seconds[index], expected, rtol=1e-12)
        sums = np.zeros((n_nano_batches, 4))
        np.add.at(sums, (nano, rank), expected)
        np.testing.assert_allclose(found.rank_seconds[:, index], sums, rtol=1e-12)
    longest = np.zeros((n_nano_batches, 4), dtype=np.int64)
    np.maximum.at(longest, (nano, rank), end)
    np.testing.assert_array_equal(found.longest, longest)


def test_a_nano_batch_counts_segments_from_its_first() -> None:
    manifest = stream_manifest(LENGTHS, 2, n_nano_batches=2)
    batches = nano_batches(manifest, survey(manifest, build_fleet(in_place(2), 2)))
    assert batches[0].low == 0
    assert batches[1].low == len(batches[0].segments.begin)
    for batch in batches:
        segments = batch.segments
        first = segments.first_of_document[segments.document]
        np.testing.assert_array_equal(segments.document[first], segments.document)
        assert (segments.begin[first] == 0).all()
        pairs = segments.end.astype(float) ** 2 - segments.begin.astype(float) ** 2
        mean_end = (pairs * segments.end).sum() / pairs.sum()
        assert batch.home[FORWARD].mean_end == pytest.approx(mean_end, rel=1e-12)
