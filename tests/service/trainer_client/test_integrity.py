"""Servers that damage results, and networks that damage messages: found, named, worked around.

Real processes over UCX. The faults are injected into one of two pool servers; the other one, or the
ranks themselves, run its ticks again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core_attention.checksum import seal
from core_attention.manifest import RankManifest, Segment
from tests.support.cluster import NODE_SHAPE, Cluster
from tests.support.cut_manifests import pieces
from tests.support.team import Team

N_LAYERS = 2

_DAMAGE_RESULTS = """
from core_attention.kernels.cpu import CpuKernel
forward, backward = CpuKernel.forward, CpuKernel.backward
def damaged_forward(self, parts, scale, *rule):
    forward(self, parts, scale, *rule)
    for part in parts:
        part.o[part.tasks.q_begin[0]] {how}
def damaged_backward(self, parts, scale, *rule):
    backward(self, parts, scale, *rule)
    for part in parts:
        part.dq[part.tasks.q_begin[0]] {how}
CpuKernel.{phase} = damaged_{phase}
"""

_DAMAGE_MESSAGES = """
import attention_node.tick_server as module
seal = module.seal
def sealed_and_damaged(message, tag, key):
    seal(message, tag, key)
    message[len(message) // 2] ^= 4
module.seal = sealed_and_damaged
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Cluster]:
    """A control plane and one sound server."""
    cluster = Cluster(tmp_path)
    try:
        cluster.start_node("sound")
        yield cluster
    finally:
        cluster.close()


def lengths(*documents: int) -> list[RankManifest]:
    """Two ranks that hold the same documents, of their own, in both nano-batches."""
    return [
        RankManifest.from_lengths(0, rank, [list(documents), list(documents)]) for rank in range(2)
    ]


def cut_at_home() -> list[RankManifest]:
    """Two ranks with documents, of their own, that begin in nano-batch 0 and go on in 1."""
    return [
        RankManifest(
            0,
            rank,
            (
                (Segment(rank, 9, 0, 9), Segment(2 + rank, 60, 0, 33)),
                (Segment(2 + rank, 60, 33, 27), Segment(4 + rank, 3, 0, 3)),
            ),
        )
        for rank in range(2)
    ]


def tree_at_home() -> list[RankManifest]:
    """Two ranks, each with a tree, of which one reads a branch of the other."""
    return pieces(
        "1:0-40/40 2:40-60/60<1@40 3:20-50/50<1@20 4:60-61/61<2@60 | 5:0-3/3",
        "6:0-40/40 7:40-60/60<6@40 8:40-41/41<6@40 9:61-70/70<4@61 | 10:0-3/3",
    )


def team_on(cluster: Cluster, **options: Any) -> Team:
    return Team(cluster, 2, NODE_SHAPE, placement="pool", n_layers=N_LAYERS, **options)


def metric(team: Team, name: str, **labels: str) -> float:
    """Summed over the ranks."""
    total = 0.0
    for session in team.sessions:
        identity = {"job_name": session.options.job, "rank": str(session.options.rank)}
        value = session.metrics_registry.get_sample_value(
            f"distca_trainer_{name}", {**identity, **labels}
        )
        assert value is not None, name
        total += value
    return total


@pytest.mark.parametrize("placement", ["pool", "mixed"])
def test_undisturbed_steps_pass_every_check(pool: Cluster, placement: str) -> None:
    options: dict[str, Any] = {"checksums": True, "check_results": True, "audit_rate": 1.0}
    with Team(pool, 2, NODE_SHAPE, placement=placement, n_layers=N_LAYERS, **options) as team:
        for seed in range(3):
            team.check(lengths(40, 1, 9), seed=seed)
            team.check(cut_at_home(), seed=seed)
            team.check(tree_at_home(), seed=seed)
        for session in team.sessions:
            session._examiner.close()
        assert metric(team, "audited_tasks_total", result="equal") > 0
        assert metric(team, "audited_tasks_total", result="different") == 0
        for kind in ("checksum", "not_finite", "audit"):
            assert metric(team, "corrupt_results_total", kind=kind) == 0
        assert metric(team, "recovery_seconds_count") == 0


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_server_that_returns_nan_is_named_and_its_ticks_run_again(
    pool: Cluster, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool.start_node("faulty", prelude=_DAMAGE_RESULTS.format(phase=phase, how="= float('nan')"))
    with team_on(pool) as team, caplog.at_level(logging.WARNING):
        for seed in range(3):
            team.check(lengths(40, 1, 9), seed=seed)
        assert metric(team, "corrupt_results_total", kind="not_finite") >= 1
        assert metric(team, "recovery_seconds_count") >= 1
    assert "without faulty" in caplog.text
    assert "is not finite in document" in pool.control_plane.log.read_text()


def test_message_that_is_damaged_on_the_way_is_named_and_its_tick_runs_again(
    pool: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    pool.start_node("faulty", prelude=_DAMAGE_MESSAGES)
    with team_on(pool, checksums=True) as team, caplog.at_level(logging.WARNING):
        for seed in range(2):
            team.check(lengths(40, 1, 9), seed=seed)
        assert metric(team, "corrupt_results_total", kind="checksum") >= 1
    assert "without faulty" in caplog.text
    assert "checksum" in pool.control_plane.log.read_text()


def test_request_that_is_damaged_on_the_way_is_refused_and_sent_again(
    pool: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    damages = [1]

    def damage_once(message: torch.Tensor, tag: int, key: bytes) -> None:
        seal(message, tag, key)
        if damages:
            message[0] ^= damages.pop()

    monkeypatch.setattr("trainer_client.step.replies.seal", damage_once)
    with team_on(pool, checksums=True) as team, caplog.at_level(logging.WARNING):
        team.check(lengths(40, 1, 9))
    log = (pool.folder / "sound.log").read_text()
    assert "checksum" in log
    assert "rank" in log


def test_audit_names_the_server_that_is_slightly_wrong(
    pool: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The step that it is found in has used the result; later ones do without the server."""
    pool.start_node("faulty", prelude=_DAMAGE_RESULTS.format(phase="forward", how="+= 0.01"))
    with team_on(pool, audit_rate=1.0) as team, caplog.at_level(logging.WARNING):
        for seed in range(20):
            team.run(lengths(12, 9), seed=seed)
            if "without faulty" in caplog.text:
                break
        assert metric(team, "audited_tasks_total", result="different") >= 1
        assert metric(team, "corrupt_results_total", kind="audit") >= 1
        team.check(lengths(12, 9), seed=100)
    assert "o of server faulty differs from its recomputation" in caplog.text
    assert "without faulty" in caplog.text
