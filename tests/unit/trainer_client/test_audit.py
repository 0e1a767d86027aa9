"""Audits: correct results pass whatever the dtype, damage beyond rounding is found and named, and
nobody foresees which tasks and rows are audited."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from core_attention.ca_task import Phase
from core_attention.kernels.cpu import CpuKernel
from core_attention.kernels.protocol import BackwardPart, ForwardPart, TaskBatch
from core_attention.manifest import RankManifest, Segment
from core_attention.plan import Plan
from tests.unit.trainer_client.answers import (
    SHAPE,
    answer_of,
    one_document_over_two_ranks,
    plan_of,
    two_documents_at_home,
)
from trainer_client.integrity.answer import Answer
from trainer_client.integrity.audit import ROWS, AuditFinding, Auditor

SCALE = SHAPE.default_softmax_scale
CLOSE_SECONDS = 30.0

_AUDITORS: list[Auditor] = []


@pytest.fixture(autouse=True)
def close_auditors() -> Iterator[None]:
    """Closes what :func:`auditor_of` has made."""
    yield
    while _AUDITORS:
        _AUDITORS.pop().close(CLOSE_SECONDS)


def auditor_of(
    found: list[AuditFinding] | None = None,
    rate: float = 1.0,
) -> Auditor:
    """An auditor whose findings come into ``found``."""
    on_finding = (lambda _: None) if found is None else found.append
    device = torch.device("cpu")
    auditor = Auditor(rate, scale=SCALE, on_finding=on_finding, device=device)
    _AUDITORS.append(auditor)
    return auditor


def findings(*answers: Answer) -> list[AuditFinding]:
    """What auditing all tasks of ``answers`` finds, in the order of their queries."""
    found: list[AuditFinding] = []
    for answer in answers:
        auditor = auditor_of(found)
        auditor.sample(answer)
        auditor.close(CLOSE_SECONDS)
        assert auditor.skipped == 0
    return sorted(found, key=lambda finding: finding.where)


def long_document() -> Plan:
    """Document 3 of 300 tokens on rank 0, cut at 120; server 0 runs all of it."""
    return plan_of(
        [RankManifest(5, 0, ((Segment(3, 300, 0, 300),),))], [(0, 0, 120, 0), (0, 120, 300, 0)]
    )


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [two_documents_at_home, long_document])
def test_correct_results_pass(phase: Phase, dtype: torch.dtype, make: Callable[[], Plan]) -> None:
    found = findings(answer_of(make(), phase, dtype=dtype))
    assert [finding.equal for finding in found] == [True, True]
    assert all(finding.difference < 0.5 for finding in found)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_of_the_real_kernel_pass(phase: Phase, dtype: torch.dtype) -> None:
    """Rounded as servers round them, where the reference rounds once at the end."""
    answer = answer_of(long_document(), phase, dtype=dtype)
    found = findings(replace(answer, results=run_kernel(answer, phase)))
    assert [finding.equal for finding in found] == [True, True], found


def run_kernel(answer: Answer, phase: Phase) -> dict[str, torch.Tensor]:
    """The CPU kernel on the one document of ``answer``."""
    zero = np.zeros(1, np.int64)
    end = np.array([len(answer.inputs["q"])])
    tasks = TaskBatch(q_begin=zero, q_end=end, k_begin=zero, k_end=end, dk_begin=zero)
    kernel, given = CpuKernel(), answer.inputs
    out = {name: torch.empty_like(tensor) for name, tensor in answer.results.items()}
    if phase is Phase.FORWARD:
        kernel.forward(
            [ForwardPart(given["q"], given["k"], given["v"], out["o"], out["lse"], tasks)], SCALE
        )
        return out
    dk, dv = (torch.zeros(given[name].shape) for name in ("k", "v"))
    part = BackwardPart(
        q=given["q"],
        k=given["k"],
        v=given["v"],
        do=given["do"],
        lse=given["lse"],
        delta=given["delta"],
        dq=out["dq"],
        dk=dk,
        dv=dv,
        tasks=tasks,
    )
    kernel.backward([part], SCALE)
    return {"dq": out["dq"], "dk": dk.to(out["dk"].dtype), "dv": dv.to(out["dv"].dtype)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("phase", "name"),
    [
        (Phase.FORWARD, "o"),
        (Phase.FORWARD, "lse"),
        (Phase.BACKWARD, "dq"),
        (Phase.BACKWARD, "dk"),
        (Phase.BACKWARD, "dv"),
    ],
)
def test_damage_is_found_and_named(phase: Phase, name: str, dtype: torch.dtype) -> None:
    """One element in a document of fewer rows than are recomputed."""
    answer = answer_of(two_documents_at_home(), phase, dtype=dtype)
    results = {key: tensor.clone() for key, tensor in answer.results.items()}
    results[name].flatten(1)[2, 1] += 0.25
    first, second = findings(replace(answer, results=results))
    assert not first.equal
    assert second.equal
    assert (first.name, first.server_id, first.tick) == (name, "server-0", answer.tick)
    assert first.where == "document 7, task [0, 4)"


def test_result_that_is_not_a_number_is_a_difference() -> None:
    answer = answer_of(two_documents_at_home(), Phase.FORWARD)
    results = {**answer.results, "o": torch.full_like(answer.results["o"], torch.nan)}
    assert not any(finding.equal for finding in findings(replace(answer, results=results)))


def test_tasks_whose_keys_lie_elsewhere_are_left_out() -> None:
    plan = one_document_over_two_ranks()
    assert findings(answer_of(plan, Phase.FORWARD, rank=1)) == []
    (head,) = findings(answer_of(plan, Phase.FORWARD, rank=0))
    assert head.equal
    (backward,) = findings(answer_of(plan, Phase.BACKWARD, rank=0))
    assert backward.equal


def test_key_gradients_of_other_ranks_queries_are_not_judged() -> None:
    answer = answer_of(one_document_over_two_ranks(), Phase.BACKWARD, rank=0)
    results = {**answer.results, "dk": answer.results["dk"] + 1.0}
    (finding,) = findings(replace(answer, results=results))
    assert finding.equal


def test_rows_are_others_in_every_session_tick_phase_and_replay() -> None:
    """All draws of 16 of 300 rows differ, but for a probability far below 1e-9."""
    answers = [answer_of(long_document(), phase) for phase in Phase]
    answers.append(replace(answers[0], tick=replace(answers[0].tick, layer=0)))
    sessions = [auditor_of(), auditor_of()]
    drawn = [chosen_rows(each, answer) for each in sessions for answer in answers * 2]
    assert len(set(drawn)) == len(drawn)


def chosen_rows(auditor: Auditor, answer: Answer) -> tuple[int, ...]:
    """The queries to recompute, over all tasks of ``answer``."""
    return tuple(row for sample in auditor.choose(answer) for row in sample.queries.tolist())


def many_documents() -> Answer:
    """200 tasks."""
    manifest = RankManifest(5, 0, (tuple(Segment(d, 2, 0, 2) for d in range(200)),))
    return answer_of(plan_of([manifest], [(d, 0, 2, 0) for d in range(200)]), Phase.FORWARD)


def test_a_share_of_the_tasks_is_audited() -> None:
    chosen = list(auditor_of(rate=0.25).choose(many_documents()))
    # Six standard deviations of the number of chosen tasks.
    assert abs(len(chosen) - 50) < 37


def test_nobody_foresees_which_tasks_are_skipped_where_audits_fall_behind() -> None:
    answer, auditor = many_documents(), auditor_of()
    firsts = {next(auditor.choose(answer)).document for _ in range(20)}
    # 20 draws of 200 are all the same with a probability of 200**-19.
    assert len(firsts) > 1


def test_long_tasks_cost_a_few_rows() -> None:
    samples = auditor_of().choose(answer_of(long_document(), Phase.BACKWARD))
    copied = [len(rows) for sample in samples for rows in sample.given.values()]
    assert 0 < max(copied) <= ROWS


def test_no_server_is_blamed_for_keys_that_the_model_has_written_over() -> None:
    found: list[AuditFinding] = []
    changed = threading.Event()

    class Late(Auditor):
        def _audit(self, sample):  # type: ignore[no-untyped-def]
            assert changed.wait(CLOSE_SECONDS)
            return super()._audit(sample)

    answer = answer_of(long_document(), Phase.FORWARD)
    auditor = Late(1.0, scale=SCALE, on_finding=found.append, device=torch.device("cpu"))
    auditor.sample(answer)
    answer.inputs["k"].zero_()
    changed.set()
    auditor.close(CLOSE_SECONDS)
    assert found == []
    assert auditor.skipped == 2
