"""The ``distca`` command. Each subcommand lives in a module of ``distca.apps.commands`` and imports
what it needs when it runs, so that ``distca --help`` stays fast."""

from __future__ import annotations

import logging
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from distca.apps.commands import (
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
    up,
)
from distca.configuration import misspelt_variables, name_variables, read_config
from distca.errors import DistcaError
from distca.process.interrupt import (
    INTERRUPTED_EXIT_CODE,
    let_sigterm_end_process_1,
    say_interrupted,
)
from distca.process.logs import LogFormat, logs_are_json, start_logging
from distca.process.plain_text import plain_lines
from distca.shown_errors import shown_error

logger = logging.getLogger(__name__)

app = typer.Typer(
    no_args_is_help=True,
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


SERVICES = frozenset({"control-plane", "attention-node"})
"""Commands that print nothing else; their log says that they run, and at which address."""


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"distca {version('distca')}")
        raise typer.Exit


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Before any other option: the file has their defaults."""
    if path is not None and not context.resilient_parsing:
        try:
            context.default_map = read_config(path, context.command)
        except DistcaError as error:
            raise typer.BadParameter(str(error)) from error
    return path


@app.callback()
def _configure(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with values for options, see docs/configuration.md; flags and "
            "environment variables come before it.",
            envvar="DISTCA_CONFIG",
            callback=_read_config,
            is_eager=True,
        ),
    ] = None,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(
            help="How much is logged, to stderr. Default: info by control-plane and "
            "attention-node, warning by other commands.",
            envvar="DISTCA_LOG_LEVEL",
        ),
    ] = None,
    log_format: Annotated[
        LogFormat,
        typer.Option(
            help="Lines for people, or one JSON object a line.", envvar="DISTCA_LOG_FORMAT"
        ),
    ] = LogFormat.TEXT,
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
    command = context.invoked_subcommand or ""
    by_default = LogLevel.INFO if command in SERVICES else LogLevel.WARNING
    start_logging(log_level or by_default, log_format, command)
    for name, meant in misspelt_variables(context.command, os.environ):
        logger.warning(
            "environment variable %s is ignored: no option reads it; did you mean %s?", name, meant
        )
    if traces_endpoint and context.invoked_subcommand is not None:
        from distca.process import tracing

        tracing.start(traces_endpoint, context.invoked_subcommand)


app.command("control-plane")(control_plane.control_plane)
app.command("attention-node")(attention_node.attention_node)
app.command("train")(train.train)
app.command("local")(local.local)
app.command("up")(up.up)
app.command("health")(health.health)
app.add_typer(certs.app, name="certs")
app.command("doctor")(doctor.doctor)
app.command("top")(top.top)
app.command("profile")(profile.profile)
app.command("plan")(plan.plan)
app.command("schedule")(schedule.schedule)
app.command("simulate")(simulate.simulate)


def command_line() -> Any:
    """The whole command; its options are read from the environment, too."""
    command = typer.main.get_command(app)
    name_variables(command)
    return command


def main() -> None:
    """Runs the command line and exits: 0 done, 1 failed, 2 wrong usage, 130 interrupted.

    Errors that are meant for people are shown by name in one line; any other exception is a defect
    and keeps its traceback. Ctrl-C is one line, too.
    """
    let_sigterm_end_process_1()
    try:
        command_line()(prog_name="distca")
    except SystemExit as end:
        if end.code == INTERRUPTED_EXIT_CODE:
            say_interrupted()
        raise
    except Exception as error:
        shown = shown_error(error)
        if shown is None:
            raise
        logger.debug("traceback of the error below", exc_info=True)
        _show(*shown)
        sys.exit(1)


def _show(name: str, text: str) -> None:
    if logs_are_json():
        logger.error("%s: %s", name, text)
        return
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"[bold red]{name}[/]: ", end="")
    console.print(plain_lines(text), markup=False, highlight=False)
