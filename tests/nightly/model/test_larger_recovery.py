"""Recovery in every order of events, in settings that take minutes each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.service.model.setting import Setting
from tests.service.model.test_recovery import CHAIN, CROSSED, LANES, PAIR, explored

LARGE_SETTINGS = {
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


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("setting", LARGE_SETTINGS.values(), ids=LARGE_SETTINGS)
def test_recovery_holds_in_larger_settings(setting: Setting) -> None:
    assert explored(setting, max_states=5_000_000).finished_states > 0
