"""``distca schedule``: pipeline schedules as CSV, as ``torch.distributed.pipelining`` runs them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import typer

from core_attention.schedule_orders import SCHEDULES, Order, zero_bubble
from distca.options import option, options_from


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """A schedule's name and the sizes of its pipeline."""

    PANEL: ClassVar = "Schedule"

    name: str = option("zero-bubble", f"One of {', '.join(SCHEDULES)}.")
    ranks: int = option(4, "Ranks of a pipeline.")
    microbatches: int = option(8, "Microbatches of a step.")
    max_deferred: int | None = option(
        None,
        "Of the zero-bubble order: microbatches between both parts of their backward on a rank, "
        "at most; default: any number.",
    )
    output: Path | None = option(None, "Write it to this file instead of the terminal.")


@options_from
def schedule(settings: ScheduleSettings) -> None:
    """Write a pipeline schedule as CSV: a line a rank, with actions like 2F0 (stage, forward,
    microbatch) in the order of time; F, B, or I and W for backwards in two parts.

    Example: distca schedule --name zero-bubble --ranks 4 --microbatches 8 --output zb.csv
    """
    from core_attention.schedule import write_csv
    from core_attention.whole_file import write_whole
    from distca.apps.preview.output import wrong_input_ends

    if settings.name not in SCHEDULES:
        raise typer.BadParameter(f"--name is {settings.name!r}; valid are {', '.join(SCHEDULES)}")
    order: Order = SCHEDULES[settings.name]
    if settings.max_deferred is not None:
        if settings.name != "zero-bubble":
            raise typer.BadParameter(
                f"--max-deferred goes with --name zero-bubble, not {settings.name}; leave it out"
            )
        order = partial(zero_bubble, max_deferred=settings.max_deferred)
    with wrong_input_ends():
        made = order(settings.ranks, settings.microbatches)
        if settings.output is None:
            typer.echo(write_csv(made), nl=False)
        else:
            write_whole(settings.output, write_csv(made))
    typer.echo(
        f"{made.name}: {made.n_stages} stages on {made.n_ranks} ranks, {made.n_microbatches} "
        f"microbatches, at most {made.peak_in_flight:g} of them in flight on a rank",
        err=True,
    )
