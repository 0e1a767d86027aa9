"""One server in every order of events, in settings that take minutes each."""

from __future__ import annotations

import pytest

from tests.service.model.serving import Serving, piped
from tests.service.model.test_serving import explored

LARGE_SETTINGS = {
    "a pipeline of three": piped("1f1b", 3, 4, limit_bytes=3),
    "a microbatch of a pipeline and a recovery": piped("gpipe", 2, 1, recoveries=1),
    "a pipeline and a recovery": piped("1f1b", 2, 2, recoveries=1),
    "pipelines that share documents": piped("1f1b", 2, 2, replicas=2, limit_bytes=4),
    "a reset": Serving(forward_only=True, resets=1),
    "frozen layers and a recovery": Serving(frozen=True, recoveries=1),
    "keys only and a recovery": Serving(
        n_layers=2, keys_only=True, forward_only=True, recoveries=1
    ),
    "little memory and a recovery": Serving(
        n_layers=2, keys_only=True, forward_only=True, limit_bytes=2, recoveries=1
    ),
    "two lanes, in place": Serving(n_lanes=2, forward_only=True, local_rank=0, recoveries=1),
    "two lanes": Serving(n_lanes=2, forward_only=True, recoveries=1),
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("setting", LARGE_SETTINGS.values(), ids=LARGE_SETTINGS)
def test_a_server_serves_in_larger_settings(setting: Serving) -> None:
    assert explored(setting, max_states=1_000_000).finished_states > 0
