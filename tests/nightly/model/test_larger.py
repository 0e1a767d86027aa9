"""Recovery, and one server, in every order of events, in settings that take minutes each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.service.model import test_recovery, test_serving
from tests.service.model.serving import Serving, piped
from tests.service.model.setting import Setting
from tests.service.model.test_recovery import CHAIN, CROSSED, LANES, PAIR

RECOVERIES = {
    "a server dies, another is cut off": replace(PAIR, crashes=1, cuts=1),
    "two layers in two lanes": replace(LANES, n_layers=2, crashes=1),
    "the control plane dies, two lanes": replace(LANES, restarts=1),
    "the control plane dies in a chain": replace(CHAIN, restarts=1),
    "two steps, and the control plane dies": replace(PAIR, n_steps=2, restarts=1),
    "two servers die in a chain": replace(CHAIN, crashes=2),
    "two cuts": replace(PAIR, cuts=2),
    "two servers die in two lanes": replace(LANES, crashes=2),
    "a cut in two lanes": replace(CROSSED, n_layers=2, cuts=1),
    "a server and the control plane die": replace(PAIR, crashes=1, restarts=1),
    "the control plane dies twice": replace(PAIR, restarts=2),
    "two steps, two servers die": replace(PAIR, n_steps=2, crashes=2),
    "two steps, slow threads": replace(PAIR, n_steps=2, crashes=1, threads=True),
    "slow threads in a chain": replace(CHAIN, crashes=1, threads=True),
    "slow threads in two lanes": replace(LANES, crashes=1, threads=True),
    "three servers, two die": replace(PAIR, n_servers=3, crashes=2),
}


SERVERS = {
    "a recovery": Serving(recoveries=1),
    "a recovery that is not heard of": test_serving.UNHEARD,
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
@pytest.mark.parametrize("setting", RECOVERIES.values(), ids=RECOVERIES)
def test_recovery_holds_in_larger_settings(setting: Setting) -> None:
    assert test_recovery.explored(setting, max_states=5_000_000).finished_states > 0


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("setting", SERVERS.values(), ids=SERVERS)
def test_a_server_serves_in_larger_settings(setting: Serving) -> None:
    assert test_serving.explored(setting, max_states=1_000_000).finished_states > 0
