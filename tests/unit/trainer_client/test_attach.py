"""Loops around an attached model, whose ticks are computed in the process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distca
from core_attention.errors import ManifestError, TensorError
from tests.cluster.trainer_client.attach_runs import LOOPS, SETTINGS, Run
from tests.support.errors import refused
from tests.unit.trainer_client.local_session import LocalSession
from trainer_client.attach import attached
from trainer_client.attach.call_rows import CallRows
from trainer_client.environment import options_of_environment, session_options, with_own_port
from trainer_client.errors import SessionError
from trainer_client.turns.branches import Branches, RowDocuments

IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture(autouse=True)
def local_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "Session", LocalSession)
    # An address that need not be looked for.
    environment = attached._of_environment
    monkeypatch.setattr(
        attached, "_of_environment", lambda: {"data_host": "127.0.0.1", **environment()}
    )
    monkeypatch.setenv("DISTCA_CONTROL_PLANE", "localhost:1")
    monkeypatch.setenv("DISTCA_JOB", "job")


@pytest.mark.parametrize(
    ("loop", "n_steps", "n_skips"),
    [
        ("plain", 6, 0),
        ("one_backward_of_two", 2, 0),
        ("interleaved", 8, 0),
        ("dropped", 18, 7),
        ("forward_fails", 3, 1),
        ("checkpoints", 2, 0),
        ("lora", 1, 1),
        ("all_frozen", 6, 5),
        ("served_forwards", 6, 0),
        ("reused_buffers", 6, 0),
        ("hinted", 11, 1),
        ("hinted_rows", 7, 1),
        ("own_model", 3, 0),
    ],
)
def test_loops_train_as_with_local_attention(loop: str, n_steps: int, n_skips: int) -> None:
    """Steps are reported in order, and servers learn where lanes end early."""
    run = Run()
    LOOPS[loop](run)
    assert run.attached is not None
    session: Any = run.attached.session
    run.attached.close()
    assert session.reported == sorted(session.reported)
    assert len(session.reported) == n_steps
    assert len(session.skips) == n_skips
    with pytest.raises(SessionError):
        run.loss(run.draw(), "own" if loop == "own_model" else "position_ids")


@pytest.mark.parametrize(
    "loop",
    [
        "plain",
        "one_backward_of_two",
        "interleaved",
        "dropped",
        "forward_fails",
        "checkpoints",
        "lora",
        "served_forwards",
        "reused_buffers",
        "averaged",
        "decoder_alone",
    ],
)
def test_halves_of_rows_take_turns(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "turns", 2)
    run = Run()
    LOOPS[loop](run)
    assert run.attached is not None
    session: Any = run.attached.session
    assert {0, 1} <= session.nano_batches


@pytest.mark.parametrize("loop", ["plain", "dropped", "checkpoints", "lora"])
def test_calls_of_several_ticks_train_too(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "head_groups", 2)
    LOOPS[loop](Run())


def test_a_plan_is_awaited_at_the_first_call_and_not_before() -> None:
    """A forward that fails before it leaves its hand-in to the next one, which skips it."""
    run = Run()
    run.step()
    begun = []

    def fail(*_: Any) -> None:
        begun.append(run.steps_begun)
        raise MemoryError("no memory")

    query: Any = run.model.model.layers[0].self_attn.q_proj
    handle = query.register_forward_hook(fail)
    with pytest.raises(MemoryError):
        run.loss(run.draw())
    handle.remove()
    assert begun == [1]
    assert run.steps_begun == 1
    run.step()
    assert run.steps_begun == 3
    run.compare()


def test_a_model_attaches_by_itself_where_a_control_plane_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(attach=False)
    run.step()
    run.compare()
    monkeypatch.delenv("DISTCA_CONTROL_PLANE")
    unattached = Run(attach=False)
    with pytest.raises(SessionError):
        unattached.step()
    monkeypatch.setenv("DISTCA_OFF", "1")
    unattached.step("both")
    unattached.compare()


def test_a_control_plane_that_nobody_names_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTCA_CONTROL_PLANE", raising=False)
    with refused():
        session_options(job="a")


def test_options_come_from_the_environment_by_their_types() -> None:
    given = {"DISTCA_METRICS_PORT": "9000", "DISTCA_CHECKSUMS": "false"}
    given |= {"DISTCA_TLS_CHECK_SECONDS": "3", "DISTCA_PLANNER": "", "DISTCA_RANK": "1"}
    assert options_of_environment(given) == {
        "metrics_port": 9000,
        "checksums": False,
        "certificate_check_seconds": 3.0,
    }
    for name, value in (("ONE_HOST", "maybe"), ("TOLERANCE", "3%")):
        with refused():
            options_of_environment({f"DISTCA_{name}": value})


def test_ports_of_metrics_never_collide_on_a_host() -> None:
    hosts = [{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "8"} for rank in range(8)]
    ports = [
        with_own_port({"metrics_port": 7720}, model, each) for model in (0, 1) for each in hosts
    ]
    assert [each["metrics_port"] for each in ports] == [*range(7720, 7736)]
    assert with_own_port({"metrics_port": 0}, 1, hosts[3]) == {"metrics_port": 0}


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SystemExit(), ""),
        (SystemExit(0), ""),
        (SystemExit(3), "SystemExit: 3"),
        (MemoryError("no memory"), "MemoryError: no memory"),
    ],
)
def test_other_ranks_are_told_of_an_error_that_ends_a_block(
    error: BaseException, told: str
) -> None:
    run = Run()
    run.step()
    assert run.attached is not None
    session: Any = run.attached.session
    with pytest.raises(type(error)), run.attached:
        raise error
    assert session.closed_with == told


def test_processes_that_would_train_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SessionError):
        run.step()
    replica: Any = run.model
    replica._is_replica = True
    with pytest.raises(SessionError):
        distca.attach(replica)


@pytest.mark.parametrize(
    ("named", "lengths"),
    [
        ({}, [6, 6]),
        ({"position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]])}, [2, 4, 2, 4]),
        ({"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 0], [1] * 6])}, [3, 6]),
        ({"attention_mask": torch.ones(2, 6)}, [6, 6]),
        ({"attention_mask": torch.tensor([[1, 1, 2, 2, 2, 0], [1] * 6])}, [2, 3, 6]),
        ({"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 4, 6])}, [4, 2]),
    ],
)
def test_documents_are_read_from_a_call(named: dict[str, Any], lengths: list[int]) -> None:
    assert CallRows.of({"input_ids": IDS, **named}).lengths == lengths


TREE = {
    "document_lengths": [3, 2, 1],
    "document_offsets": [0, 3, 1],
    "document_parents": [-1, 0, 0],
}


def test_a_tree_is_read_from_a_call() -> None:
    rows = CallRows.of({"input_ids": IDS[:1], **TREE})
    assert rows.documents == RowDocuments([3, 2, 1], Branches((0, 3, 1), (-1, 0, 0)))
    assert rows.positions(torch.device("cpu")).tolist() == [[0, 1, 2, 3, 4, 1]]
    assert not TREE.keys() & rows.packed({"input_ids": IDS[:1], **TREE}).keys()


@pytest.mark.parametrize(
    "changes",
    [
        {"document_offsets": None},
        {"document_parents": [-1, 0]},
        {"document_lengths": [3, 3, 0]},
        {"document_lengths": [3, 2, 2]},
        {"document_parents": [-1, 0, 2]},
        {"document_parents": [-1, 0, 3]},
        {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5]])},
        {"input_ids": IDS},
    ],
)
def test_a_tree_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ManifestError):
        CallRows.of({"input_ids": IDS[:1], **TREE, **changes})


@pytest.mark.parametrize(
    "branches",
    [
        Branches((0, 4, 1), (-1, 0, 0)),
        Branches((0, 1, 1), (-1, 2, 1)),
        Branches((0, 3, 1), (-1, 0, 0), (0, 0, 1)),
    ],
)
def test_rows_at_home_have_their_prefixes_there(branches: Branches) -> None:
    assert Branches((0, 3, 4), (-1, 0, 1)).prefixes([3, 2, 1]) == [[], [(0, 3)], [(0, 3), (3, 1)]]
    with pytest.raises(ManifestError):
        branches.prefixes([3, 2, 1])


@pytest.mark.parametrize(
    "named",
    [
        {"input_ids": None},
        {"attention_mask": torch.ones(2, 1, 6, 6)},
        {"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1], [1] * 6])},
        {"cu_seq_lens_q": torch.tensor([0, 6])},
        {"position_ids": torch.arange(6).expand(3, 2, 6)},
        {
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6]),
            "position_ids": torch.arange(6)[None],
        },
        {
            "attention_mask": torch.tensor([[1, 1, 2, 2, 2, 0], [1] * 6]),
            "position_ids": torch.arange(6)[None],
        },
    ],
)
def test_calls_that_do_not_say_where_documents_begin_are_refused(named: dict[str, Any]) -> None:
    with pytest.raises(ManifestError):
        CallRows.of({"input_ids": IDS, **named})


@pytest.mark.parametrize(
    "named",
    [
        {"causal": False},
        {"causal": True, "dropout_p": 0.1},
        {"causal": True, "alibi_slopes": torch.ones(4)},
        {"causal": True, "return_attn_probs": True},
    ],
)
def test_what_flash_attn_has_and_servers_have_not_is_refused(named: dict[str, Any]) -> None:
    q, k = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 2, 8)
    with pytest.raises(TensorError):
        distca.flash_attn_func(q, k, k, **named)
