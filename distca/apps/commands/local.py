"""``distca local``: a whole run on this machine."""

from __future__ import annotations

import os
from datetime import datetime

import typer

from distca.apps.local.settings import LocalSettings
from distca.apps.train.settings import DataSettings, ModelSettings, TrainingSettings
from distca.contract.settings import IntegritySettings, PlanRequest
from distca.options import options_from
from distca.process.interrupt import INTERRUPTED_EXIT_CODE


@options_from
def local(
    local: LocalSettings,
    data: DataSettings,
    model: ModelSettings,
    training: TrainingSettings,
    plan: PlanRequest,
    integrity: IntegritySettings,
) -> None:
    """Train on this machine: starts control plane, attention nodes and trainers as processes.

    When one of them dies all of them end, and the one that died is named. Ctrl-C stops after the
    current step, saves a checkpoint and ends everything.
    """
    from rich.console import Console

    from distca.apps.local.launcher import LocalRun, launch
    from distca.apps.report.summary import show_paths
    from distca.apps.train.corpus import open_corpus

    console = Console()
    # The trainers open it themselves; here only so that a mistake is told at once.
    open_corpus(data.data)
    run = LocalRun(
        local=local,
        data=data,
        model=model,
        training=training,
        plan=plan,
        integrity=integrity,
        environ=os.environ,
    )
    folder = local.run_folder(datetime.now())
    with folder.held():
        goes_on = training.resume_or_start and folder.newest_checkpoint() is not None
        folder.prepare(resume=training.resume or goes_on)
        try:
            finished = launch(run, folder, console)
        finally:
            show_paths(console, Checkpoint=folder.newest_checkpoint(), Logs=folder.logs)
    if not finished:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
