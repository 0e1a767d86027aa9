"""``distca train``: one trainer rank, as torchrun or ``distca local`` starts it."""

from __future__ import annotations

import os

import typer

from distca.apps.data.settings import DataSettings
from distca.apps.train.settings import (
    ModelSettings,
    PlanSettings,
    ServiceSettings,
    TrainingSettings,
)
from distca.contract.settings import ClientTls, IntegritySettings
from distca.options import options_from
from distca.process.interrupt import INTERRUPTED_EXIT_CODE


@options_from
def train(
    service: ServiceSettings,
    data: DataSettings,
    model: ModelSettings,
    training: TrainingSettings,
    plan: PlanSettings,
    integrity: IntegritySettings,
    tls: ClientTls,
) -> None:
    """Train a model with its core attention served; start it with torchrun, once a rank.

    Ctrl-C (or SIGTERM) stops after the current step and saves a checkpoint.
    """
    from rich.console import Console

    from distca.apps.commands.explained import explained
    from distca.apps.commands.usage import as_usage_error
    from distca.apps.report.summary import show_outcome
    from distca.apps.train.ranks import RankEnvironment
    from distca.apps.train.run import TrainerRun, run_trainer
    from distca.run_folder import RunFolder

    with as_usage_error():
        ranks = RankEnvironment.from_environ(os.environ, service.rendezvous)
    run = TrainerRun(
        ranks=ranks,
        service=service,
        data=data,
        model=model,
        training=training,
        plan=plan,
        integrity=integrity,
        tls=tls,
    )
    console = Console()
    folder = RunFolder(service.run_dir)
    if ranks.rank == 0:
        folder.open()
    try:
        with explained(certificate=tls.certificate_file, control_plane=service.control_plane):
            finished = run_trainer(run, console)
    finally:
        if ranks.rank == 0:
            show_outcome(folder, console)
    if not finished:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
