"""NaN and Inf in a result are found and laid at the right door."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from core_attention.ca_task import Phase
from core_attention.kernels.launcher import LauncherError
from tests.unit.trainer_client.answers import (
    SHAPE,
    answer_of,
    one_document_over_two_ranks,
    two_documents_at_home,
)
from trainer_client.integrity import result_checks
from trainer_client.integrity.answer import Answer
from trainer_client.integrity.result_checks import ResultChecker, first_bad_row

CPU = torch.device("cpu")


def new_checker() -> ResultChecker:
    return ResultChecker(CPU, scale=SHAPE.default_softmax_scale)


def damaged(answer: Answer, name: str, row: int, value: float = torch.nan) -> Answer:
    """``answer`` with one element of one result changed on the way."""
    results = {key: tensor.clone() for key, tensor in answer.results.items()}
    results[name].flatten(1)[row, -1] = value
    return replace(answer, results=results)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_correct_results_are_nobodys_fault(phase: Phase, dtype: torch.dtype) -> None:
    checker = new_checker()
    for server in range(2):
        answer = answer_of(two_documents_at_home(), phase, server=server, dtype=dtype)
        assert checker.fault(answer) is None


@pytest.mark.parametrize(
    ("phase", "server", "name", "row", "where"),
    [
        (Phase.FORWARD, 0, "o", 2, "document 7, query 2 of the task [0, 4)"),
        (Phase.FORWARD, 0, "lse", 4, "document 9, query 0 of the task [0, 6)"),
        (Phase.FORWARD, 1, "o", 5, "document 7, query 9 of the task [4, 10)"),
        (Phase.BACKWARD, 0, "dq", 9, "document 9, query 5 of the task [0, 6)"),
        (Phase.BACKWARD, 0, "dk", 3, "document 7, key 3"),
        (Phase.BACKWARD, 1, "dv", 9, "document 7, key 9"),
    ],
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_server_that_damages_a_result_is_blamed_with_the_task(
    phase: Phase, server: int, name: str, row: int, where: str, value: float
) -> None:
    answer = answer_of(two_documents_at_home(), phase, server=server)
    checker = new_checker()
    for _ in range(2):
        fault = checker.fault(damaged(answer, name, row, value))
        assert fault == f"{name} is not finite in {where}, though what was sent is"


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_the_model_produced_is_passed_on_with_one_warning_a_step(
    phase: Phase, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    checker = new_checker()
    with caplog.at_level(logging.WARNING):
        for layer in range(3):
            answer = answer_of(two_documents_at_home(), phase, layer=layer, poison=(name, 1))
            assert checker.fault(answer) is None
    (record,) = caplog.records
    assert "document 7" in record.message
    assert "the model produced it" in record.message


@pytest.mark.parametrize("poisoned", [True, False])
def test_server_is_blamed_once_where_other_ranks_rows_went_in(poisoned: bool) -> None:
    """Rank 1 cannot see rank 0's keys. Another server that computes the same acquits the first."""
    plan = one_document_over_two_ranks()
    checker = new_checker()
    if poisoned:
        answer = answer_of(plan, Phase.FORWARD, rank=1, poison=("k", 2))
    else:
        answer = damaged(answer_of(plan, Phase.FORWARD, rank=1), "o", 0)
    first = checker.fault(answer)
    assert first is not None
    assert "document 7, query 6 of the task [6, 10)" in first
    assert checker.fault(answer) is None
    assert checker.fault(replace(answer, tick=replace(answer.tick, layer=2))) is not None


def test_overflow_of_the_sum_alone_is_no_fault() -> None:
    answer = answer_of(two_documents_at_home(), Phase.FORWARD)
    results = {**answer.results, "o": torch.full_like(answer.results["o"], 3e38)}
    large = replace(answer, results=results)
    assert not torch.isfinite(large.results["o"].sum())
    assert first_bad_row(large) is None
    assert new_checker().fault(large) is None


def test_float16_gradients_are_left_to_loss_scaling() -> None:
    answer = answer_of(two_documents_at_home(), Phase.BACKWARD, dtype=torch.float16)
    assert new_checker().fault(damaged(answer, "dq", 0)) is None
    forward = answer_of(two_documents_at_home(), Phase.FORWARD, dtype=torch.float16)
    assert new_checker().fault(damaged(forward, "o", 0)) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_overflow_are_no_servers_fault(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """All that dk is made of is finite, and dk is not: every server computes the same."""
    answer = answer_of(two_documents_at_home(), Phase.BACKWARD, server=1, dtype=dtype)
    inputs = {name: rows.clone() for name, rows in answer.inputs.items()}
    inputs["do"].fill_(1e38)
    inputs["v"].fill_(1e3)
    large = damaged(replace(answer, inputs=inputs), "dk", 0, torch.inf)
    assert all(bool(torch.isfinite(rows).all()) for rows in inputs.values())
    checker = new_checker()
    with caplog.at_level(logging.WARNING):
        assert checker.fault(large) is None
    (record,) = caplog.records
    assert "dk is not finite in document 7, key 0; the model produced it" in record.message
    # Of the other document, whose gradients do not overflow, nothing is excused.
    other = damaged(answer_of(two_documents_at_home(), Phase.BACKWARD), "dk", 4, torch.inf)
    assert checker.fault(other) is not None


@pytest.mark.parametrize("error", [ValueError, LauncherError, torch.OutOfMemoryError])
def test_server_is_blamed_once_where_no_kernel_can_tell(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(device: torch.device) -> None:
        raise error(f"no kernel on {device}")

    monkeypatch.setattr(result_checks, "own_kernel", none)
    answer = damaged(answer_of(two_documents_at_home(), Phase.FORWARD), "o", 0)
    checker = new_checker()
    assert checker.fault(answer) is not None
    assert checker.fault(answer) is None
