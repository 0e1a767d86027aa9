"""``distca up``: control plane and attention nodes of a job, host by host."""

from __future__ import annotations

import os

import typer

from distca.apps.local.pool import PoolSettings
from distca.options import options_from
from distca.process.interrupt import INTERRUPTED_EXIT_CODE


@options_from
def up(settings: PoolSettings) -> None:
    """Start a control plane and the attention nodes of this host, and keep them up.

    Run it once on each host of a job, as ``srun --ntasks-per-node=1`` does. What ends is started
    again; a signal ends all. Ports are free ones, so that jobs of one host never collide.
    """
    from rich.console import Console

    from distca.apps.local.pool import keep_up

    keep_up(settings, os.environ, Console())
    raise typer.Exit(INTERRUPTED_EXIT_CODE)
