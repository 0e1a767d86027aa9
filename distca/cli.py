"""The ``distca`` command. Each subcommand lives in a module of ``distca.commands`` and imports what
it needs when it runs, so that ``distca --help`` stays fast."""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

from distca.commands import (
    attention_node,
    certs,
    control_plane,
    doctor,
    health,
    local,
    plan,
    profile,
    schedule,
    simulate,
    top,
    train,
    wireguard,
)
from distca.process.interrupt import INTERRUPTED_EXIT_CODE, let_sigterm_end_process_1
from distca.process.plain_text import PlainFormatter, plain_lines

_OUR_PACKAGES = {
    "attention_node",
    "control_plane",
    "core_attention",
    "data_plane",
    "distca",
    "trainer_client",
}

logger = logging.getLogger(__name__)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Core attention disaggregation: attention servers for training language models.",
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class LogLevel(StrEnum):
    """How much is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"distca {version('distca')}")
        raise typer.Exit


@app.callback()
def _configure(
    context: typer.Context,
    log_level: Annotated[
        LogLevel, typer.Option(help="How much is logged, to stderr.", envvar="DISTCA_LOG_LEVEL")
    ] = LogLevel.WARNING,
    traces_endpoint: Annotated[
        str,
        typer.Option(
            help="http://host:port of an OpenTelemetry collector (OTLP over gRPC) that traces go "
            "to; needs the extra otel. Default: no traces.",
            envvar="DISTCA_TRACES_ENDPOINT",
        ),
    ] = "",
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=log_level.upper(), handlers=[handler])
    if traces_endpoint and context.invoked_subcommand is not None:
        from distca.process import tracing

        tracing.start(traces_endpoint, context.invoked_subcommand)


app.command("control-plane")(control_plane.control_plane)
app.command("attention-node")(attention_node.attention_node)
app.command("train")(train.train)
app.command("local")(local.local)
app.command("health")(health.health)
app.add_typer(certs.app, name="certs")
app.command("doctor")(doctor.doctor)
app.command("wireguard")(wireguard.wireguard)
app.command("top")(top.top)
app.command("profile")(profile.profile)
app.command("plan")(plan.plan)
app.command("schedule")(schedule.schedule)
app.command("simulate")(simulate.simulate)


def main() -> None:
    """Runs the command line and exits: 0 done, 1 failed, 2 wrong usage, 130 interrupted.

    Errors that our packages define are meant for people, so they are shown by name in one line;
    any other exception is a defect and keeps its traceback.
    """
    let_sigterm_end_process_1()
    try:
        app(prog_name="distca")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _OUR_PACKAGES:
            raise
        logger.debug("traceback of the error below", exc_info=True)
        console = Console(stderr=True, soft_wrap=True)
        console.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        console.print(plain_lines(str(error)), markup=False, highlight=False)
        sys.exit(1)
