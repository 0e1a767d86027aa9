"""``distca simulate``: step time on 8 to 4096 GPUs, with and without disaggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from core_attention.schedule_orders import SCHEDULES
from distca.apps.preview.settings import (
    ClusterSettings,
    LengthsSettings,
    ModelSizes,
    OutputSettings,
    PlannerSettings,
)
from distca.options import option, options_from
from distca.process.interrupt import ending_at_once

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """Sizes of the job that are simulated."""

    PANEL: ClassVar = "Job"

    gpus: str = option("64,128,256,512", "Numbers of GPUs, with commas between.")
    stages: int = option(1, "Pipeline stages; 1 is none.")
    microbatches: int = option(1, "Microbatches of each pipeline in a step.")
    schedules: str = option(
        "all",
        "Pipeline schedules to compare, with commas between: all, names "
        f"({', '.join(SCHEDULES)}) or CSV files that torch.distributed.pipelining runs.",
    )
    in_flight: float | None = option(
        None, "Most microbatches whose activations a rank can keep; as many as 1F1B by default."
    )
    gradient_sync_ms: float = option(
        0.0, "What every step adds for gradients, whatever the method."
    )


@options_from
@ending_at_once()
def simulate(
    lengths: LengthsSettings,
    job: JobSettings,
    cluster: ClusterSettings,
    model: ModelSizes,
    planner: PlannerSettings,
    output: OutputSettings,
) -> None:
    """Simulate step times of plain packing, re-packing, context parallelism and CAD, with a
    verdict; with several stages also of pipeline schedules.

    Example: distca simulate --distribution prolong --gpus 64,256 --stages 4 --microbatches 8
    """
    from rich.console import Console

    from core_attention.whole_file import check_can_write_all
    from distca.apps.preview.building import (
        build_batches,
        build_method,
        build_orders,
        build_setup,
        check_pipeline_options,
        parse_counts,
        preview_notes,
        unused_remedies,
    )
    from distca.apps.preview.output import Preview, wrong_input_ends
    from distca.apps.preview.sections import comparison_section, overlap_section, schedule_section
    from distca.apps.simulator.offline import compare_batches
    from distca.apps.simulator.overlap import exposed_shares
    from distca.apps.simulator.schedules import compare_schedules, judge_schedules
    from distca.apps.simulator.verdict import judge_sizes

    def draw() -> Figure:
        from distca.apps.preview.figures import draw_comparisons

        return draw_comparisons(comparisons, preview.title)

    comparisons, schedules, shares = [], [], []
    check_can_write_all(output.png, output.html)
    with wrong_input_ends():
        check_pipeline_options(job.stages, job.schedules, job.in_flight)
        for n_gpus in parse_counts("gpus", job.gpus):
            setup = build_setup(
                model, cluster, n_gpus, job.stages, job.microbatches, job.gradient_sync_ms / 1e3
            )
            batches, estimated = build_batches(lengths, setup.step_tokens, setup.tokens_per_rank)
            method = build_method(planner, setup)
            comparisons.append(compare_batches(setup, batches, method))
            if job.stages == 1:
                shares.append(exposed_shares(setup, batches, method))
            else:
                orders, left_out = build_orders(job.schedules, setup)
                schedules.append(
                    compare_schedules(setup, batches, method, orders, job.in_flight, left_out)
                )
        remedies = unused_remedies(planner)
        columns = [f"{comparison.n_gpus} GPUs" for comparison in comparisons]
        notes = preview_notes(planner, setup, lengths, estimated)
        preview = Preview(
            title=f"{setup.model.name}, {setup.tokens_per_rank} tokens a rank of "
            f"{cluster.tensor_parallel} GPUs, {job.stages} stages, {job.microbatches} microbatches",
            sections=[
                comparison_section("Numbers of GPUs", columns, comparisons, notes),
                *([overlap_section(columns, shares)] if shares else []),
                *map(schedule_section, schedules),
            ],
            verdicts=[judge_schedules(compared, remedies) for compared in schedules]
            or judge_sizes(comparisons, remedies),
            draw=draw,
        )
        preview.show(Console())
        preview.save(output)
