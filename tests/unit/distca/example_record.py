"""A made-up run record for the report's tests."""

from __future__ import annotations

from distca.apps.report.record import (
    RunRecord,
    StepDetail,
    TrainingStep,
    Verification,
)


def example_record(*, n_steps: int = 12) -> RunRecord:
    """Two trainers and two servers, with every optional part present."""
    return RunRecord(
        name="example",
        mode="pool",
        finished=True,
        began="2026-03-01T12:00:00",
        model="LlamaForCausalLM, 4 layers, hidden 128, 8 heads, 2 kv heads",
        parameters=1_234_567,
        dtype="float32",
        data="Python's standard library",
        n_ranks=2,
        tokens_per_rank=4096,
        steps=tuple(_step(step) for step in range(n_steps)),
        detail=example_detail(),
        verification=Verification(
            steps=n_steps,
            loss=1.2e-7,
            gradient=3.4e-6,
            parameter="model.layers.0.self_attn.q_proj.weight",
            loss_tolerance=1e-5,
            gradient_tolerance=1e-4,
        ),
    )


def _step(step: int) -> TrainingStep:
    return TrainingStep(
        step=step,
        loss=5.5 / (1 + 0.1 * step),
        gradient_norm=2.0,
        tokens=8192,
        step_seconds=0.8,
        wait_seconds=0.1,
        home_imbalance=1.4 + 0.1 * (step % 4),
        planned_imbalance=1.02,
        measured_imbalance=1.05 + 0.01 * (step % 3),
        plan_seconds=0.004,
    )


def example_detail() -> StepDetail:
    """A step whose rank 0 holds one long document."""
    return StepDetail(
        step=7,
        documents=9,
        longest_document_tokens=2048,
        servers=("node-0", "node-1"),
        home_seconds=(0.120, 0.042),
        planned_seconds=(0.082, 0.080),
        measured_seconds=(0.086, 0.079),
        reason="every server is within 3 % of the mean",
    )
