"""``distca plan``: what the planner would do with your documents, before you rent a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from distca.options import options_from
from distca.preview.settings import (
    ClusterSettings,
    FleetSettings,
    LengthsSettings,
    ModelSettings,
    PlannerSettings,
)
from distca.process.interrupt import ending_at_once


@dataclass(frozen=True, kw_only=True)
class PlanOutputSettings:
    """Where the drawings go."""

    PANEL: ClassVar = "Output"

    png: Annotated[
        Path | None, typer.Option(help="Draw load, bytes and step times to this PNG.")
    ] = None
    html: Annotated[Path | None, typer.Option(help="Write all of it as one HTML page.")] = None


@options_from
@ending_at_once()
def plan(
    lengths: LengthsSettings,
    fleet: FleetSettings,
    cluster: ClusterSettings,
    model: ModelSettings,
    planner: PlannerSettings,
    output: PlanOutputSettings,
) -> None:
    """Plan batches of your documents offline, and say plainly whether CAD is worth it.

    Example: distca plan --distribution prolong --ranks 64 --html plan.html
    """
    from rich.console import Console

    from core_attention.whole_file import check_can_write_all
    from distca.preview.building import (
        build_batches,
        build_method,
        build_setup,
        check_homes,
        describe_layout,
        preview_notes,
        unused_remedies,
    )
    from distca.preview.display import print_sections, print_verdict
    from distca.preview.errors import wrong_input_ends
    from distca.preview.sections import plan_sections
    from distca.process.plain_text import plain
    from distca.simulator.fleet import Placement
    from distca.simulator.offline import judge_batches, plan_batch

    check_can_write_all(output.png, output.html)
    with wrong_input_ends():
        check_homes(planner, fleet)
        setup = build_setup(model, cluster, fleet.ranks * cluster.tensor_parallel)
        method = build_method(planner, setup)
        batches, estimated = build_batches(lengths, setup.step_tokens, setup.tokens_per_rank)
        planned = [
            plan_batch(setup, batch, method, fleet.placement, fleet.pool_servers)
            for batch in batches
        ]
    title = (
        f"{setup.model.name} on {fleet.ranks} ranks of {cluster.tensor_parallel} GPUs, "
        f"{setup.tokens_per_rank} tokens a rank, {fleet.placement} servers"
    )
    console = Console()
    console.print(plain(title), highlight=False, markup=False)
    console.print()
    notes = preview_notes(planner, setup, lengths if estimated else None)
    sections = plan_sections(planned, *notes)
    may_plan_homes = fleet.placement is not Placement.POOL
    verdict = judge_batches(planned, unused_remedies(planner, may_plan_homes))
    print_sections(console, sections)
    print_verdict(console, verdict)
    if output.png is None and output.html is None:
        return
    with wrong_input_ends():
        from distca.preview.figures import draw_plan
        from distca.preview.page import save_drawings

        caption = describe_layout(planner, fleet, setup.tokens_per_rank, len(planned))
        figure = draw_plan(planned[0], caption)
        save_drawings(figure, output.png, output.html, title, verdict.text, sections)
