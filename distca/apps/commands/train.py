"""``distca train``: one trainer rank, as torchrun or ``distca local`` starts it."""

from __future__ import annotations

import typer

from distca.apps.train.settings import (
    DataSettings,
    ModelSettings,
    ServiceSettings,
    TrainingSettings,
)
from distca.contract.settings import ClientTls, IntegritySettings, PlanRequest
from distca.options import options_from
from distca.process.interrupt import INTERRUPTED_EXIT_CODE


@options_from
def train(
    service: ServiceSettings,
    data: DataSettings,
    model: ModelSettings,
    training: TrainingSettings,
    plan: PlanRequest,
    integrity: IntegritySettings,
    tls: ClientTls,
) -> None:
    """Train a small Llama with its core attention served; start it with torchrun, once a rank.

    Ctrl-C (or SIGTERM) stops after the current step and saves a checkpoint.
    """
    from rich.console import Console

    from distca.apps.train.run import TrainerRun, run_trainer

    run = TrainerRun(
        service=service,
        data=data,
        model=model,
        training=training,
        plan=plan,
        integrity=integrity,
        tls=tls,
    )
    if not run_trainer(run, Console()):
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
