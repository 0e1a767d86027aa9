"""``distca simulate``: step time on 8 to 4096 GPUs, with and without disaggregation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from core_attention.schedule_orders import SCHEDULES
from distca.options import options_from
from distca.preview.settings import (
    ClusterSettings,
    LengthsSettings,
    ModelSettings,
    PlannerSettings,
)
from distca.process.interrupt import ending_at_once

if TYPE_CHECKING:
    from distca.simulator.comparison import Comparison
    from distca.simulator.schedules import ScheduleComparison
    from distca.simulator.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """Sizes of the job that are simulated."""

    PANEL: ClassVar = "Job"

    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, with commas between.")] = (
        "64,128,256,512"
    )
    stages: Annotated[int, typer.Option(help="Pipeline stages; 1 is none.")] = 1
    microbatches: Annotated[int, typer.Option(help="Microbatches of each pipeline in a step.")] = 1
    schedules: Annotated[
        str,
        typer.Option(
            help="Pipeline schedules to compare, with commas between: all, names "
            f"({', '.join(SCHEDULES)}) or CSV files that torch.distributed.pipelining runs."
        ),
    ] = "all"
    in_flight: Annotated[
        float | None,
        typer.Option(
            help="Most microbatches whose activations a rank can keep; as many as 1F1B by default."
        ),
    ] = None
    gradient_sync_ms: Annotated[
        float, typer.Option(help="What every step adds for gradients, whatever the method.")
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class SimulationOutputSettings:
    """Where the drawings go."""

    PANEL: ClassVar = "Output"

    png: Annotated[Path | None, typer.Option(help="Draw step time over GPUs to this PNG.")] = None
    html: Annotated[Path | None, typer.Option(help="Write all of it as one HTML page.")] = None


@options_from
@ending_at_once()
def simulate(
    lengths: LengthsSettings,
    job: JobSettings,
    cluster: ClusterSettings,
    model: ModelSettings,
    planner: PlannerSettings,
    output: SimulationOutputSettings,
) -> None:
    """Simulate step times of plain packing, re-packing, context parallelism and CAD, with a
    verdict; with several stages also of pipeline schedules.

    Example: distca simulate --distribution prolong --gpus 64,256 --stages 4 --microbatches 8
    """
    from rich.console import Console

    from core_attention.whole_file import check_can_write_all
    from distca.preview.building import (
        build_batches,
        build_method,
        build_orders,
        build_setup,
        check_pipeline_options,
        parse_counts,
        preview_notes,
    )
    from distca.preview.display import print_sections, print_verdict
    from distca.preview.errors import wrong_input_ends
    from distca.preview.sections import schedule_section, simulation_sections
    from distca.process.plain_text import plain
    from distca.simulator.comparison import compare
    from distca.simulator.schedules import compare_schedules

    comparisons, schedules = [], []
    check_can_write_all(output.png, output.html)
    with wrong_input_ends():
        check_pipeline_options(job.stages, job.schedules, job.in_flight)
        for n_gpus in parse_counts("gpus", job.gpus):
            setup = build_setup(
                model,
                cluster,
                n_gpus,
                job.stages,
                job.microbatches,
                job.gradient_sync_ms / 1e3,
            )
            batches, estimated = build_batches(lengths, setup.step_tokens, setup.tokens_per_rank)
            method = build_method(planner, setup)
            comparisons.append(compare(setup, batches, {"CAD": method}))
            if job.stages > 1:
                orders, left_out = build_orders(job.schedules, setup)
                schedules.append(
                    compare_schedules(setup, batches, method, orders, job.in_flight, left_out)
                )
    title = (
        f"{setup.model.name}, {setup.tokens_per_rank} tokens a rank of {cluster.tensor_parallel} "
        f"GPUs, {job.stages} stages, {job.microbatches} microbatches"
    )
    console = Console()
    console.print(plain(title), highlight=False, markup=False)
    console.print()
    notes = preview_notes(planner, setup, lengths if estimated else None)
    sections = [*simulation_sections(comparisons, *notes), *map(schedule_section, schedules)]
    print_sections(console, sections)
    verdicts = _verdicts(comparisons, schedules, planner)
    for verdict in verdicts:
        print_verdict(console, verdict)
    if output.png is None and output.html is None:
        return
    with wrong_input_ends():
        from distca.preview.figures import draw_comparisons
        from distca.preview.page import save_drawings

        figure = draw_comparisons(comparisons, title)
        texts = " ".join(verdict.text for verdict in verdicts)
        save_drawings(figure, output.png, output.html, title, texts, sections)


def _verdicts(
    comparisons: Sequence[Comparison],
    schedules: Sequence[ScheduleComparison],
    planner: PlannerSettings,
) -> list[Verdict]:
    """One on all numbers of GPUs, or with pipelines one on each."""
    from distca.preview.building import unused_remedies
    from distca.simulator.comparison import judge_comparisons
    from distca.simulator.schedules import judge_schedules

    remedies = unused_remedies(planner)
    if schedules:
        return [judge_schedules(compared, remedies) for compared in schedules]
    return [judge_comparisons(comparisons, "CAD", remedies)]
