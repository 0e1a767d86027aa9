"""``distca plan``: what the planner would do with your documents, before you rent a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distca.apps.preview.settings import (
    ClusterSettings,
    FleetSettings,
    GroupsSettings,
    LengthsSettings,
    ModelSizes,
    OutputSettings,
    PlannerSettings,
)
from distca.options import options_from
from distca.process.interrupt import ending_at_once

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@options_from
@ending_at_once()
def plan(
    lengths: LengthsSettings,
    groups: GroupsSettings,
    fleet: FleetSettings,
    cluster: ClusterSettings,
    model: ModelSizes,
    planner: PlannerSettings,
    output: OutputSettings,
) -> None:
    """Plan batches of your documents offline, and say plainly whether CAD is worth it.

    Example: distca plan --distribution prolong --ranks 64 --html plan.html
    """
    from rich.console import Console

    from core_attention.whole_file import check_can_write_all
    from distca.apps.preview.building import (
        build_batches,
        build_method,
        build_model,
        build_setup,
        check_homes,
        check_no_lengths,
        describe_layout,
        preview_notes,
        unused_remedies,
    )
    from distca.apps.preview.groups import groups_section, read_groups
    from distca.apps.preview.output import Preview, print_section, wrong_input_ends
    from distca.apps.preview.sections import overlap_section, plan_sections
    from distca.apps.simulator.offline import judge_batches, plan_batch
    from distca.apps.simulator.overlap import exposed_shares
    from distca.contract.settings import Placement

    def draw() -> Figure:
        from distca.apps.preview.figures import draw_plan

        return draw_plan(planned[0], describe_layout(planner, fleet, setup, len(planned)))

    check_can_write_all(output.png, output.html)
    with wrong_input_ends():
        if groups.groups is not None:
            check_no_lengths(lengths)
            n_servers = fleet.pool_servers + fleet.ranks * (fleet.placement is not Placement.POOL)
            found = groups_section(read_groups(groups.groups), build_model(model), n_servers)
            print_section(Console(), found)
            return
        check_homes(planner, fleet)
        setup = build_setup(model, cluster, fleet.ranks * cluster.tensor_parallel)
        method = build_method(planner, setup)
        batches, estimated = build_batches(lengths, setup.step_tokens, setup.tokens_per_rank)
        planned = [
            plan_batch(setup, batch, method, fleet.placement, fleet.pool_servers)
            for batch in batches
        ]
        sections = plan_sections(planned, preview_notes(planner, setup, lengths, estimated))
        if fleet.placement is Placement.IN_PLACE:
            shares = exposed_shares(setup, batches, method)
            sections.append(overlap_section(["all batches"], [shares]))
        remedies = unused_remedies(planner, fleet.placement is not Placement.POOL)
        preview = Preview(
            title=f"{setup.model.name} on {fleet.ranks} ranks of {cluster.tensor_parallel} GPUs, "
            f"{setup.tokens_per_rank} tokens a rank, {fleet.placement} servers",
            sections=sections,
            verdicts=[judge_batches(planned, remedies)],
            draw=draw,
        )
        preview.show(Console())
        preview.save(output)
