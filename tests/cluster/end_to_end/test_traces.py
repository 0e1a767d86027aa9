"""A step's trace across the processes of a real run."""

from __future__ import annotations

import pytest

from tests.cluster.end_to_end.conftest import StartRun
from tests.support.collector import collecting

N_STEPS = 3


@pytest.mark.timeout(240)
def test_a_step_is_one_trace_of_control_plane_trainers_and_nodes(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        monkeypatch.setenv("DISTCA_TRACES_ENDPOINT", collector.endpoint)
        ended = start_run("run", "--mode=pool", f"--steps={N_STEPS}").wait(200.0)
    assert ended.exit_code == 0, ended.output
    plans = [span for span in collector.spans if span.name == "distca.plan"]
    assert len({plan.trace_id for plan in plans}) == N_STEPS
    for plan in plans:
        assert not plan.parent_id
        trace = [span for span in collector.spans if span.trace_id == plan.trace_id]
        assert {(span.service, span.name) for span in trace} == {
            ("distca-control-plane", "distca.plan"),
            ("distca-control-plane", "distca.publish"),
            ("distca-train", "distca.step"),
            ("distca-attention-node", "distca.tick"),
        }
        assert {span.parent_id for span in trace if span is not plan} == {plan.span_id}
        assert sum(span.name == "distca.step" for span in trace) == 2
        assert {
            span.attributes["distca.phase"] for span in trace if span.name == "distca.tick"
        } == {"forward", "backward"}
    calls = {span.name for span in collector.spans if span.name.startswith("/distca.v1.")}
    assert "/distca.v1.Jobs/OpenJob" in calls
