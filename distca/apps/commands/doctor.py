"""``distca doctor``: checks a node before it serves or trains."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from distca.apps.doctor.settings import DoctorSettings
from distca.contract.settings import ClientTls, values_of
from distca.contract.timeouts import default_seconds
from distca.options import option, options_from

if TYPE_CHECKING:
    from distca.apps.doctor.surroundings import Surroundings

FAILED_EXIT_CODE = 1


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Whom it must reach, and what is shown."""

    control_plane: str = option(
        "",
        "host:port of the control plane; default: what needs one is left out.",
        envvar="DISTCA_CONTROL_PLANE",
    )
    connect_seconds: float = option(
        default_seconds("call_seconds"), "How long to look for the control plane."
    )
    strict: bool = option(False, "Exit with 1 for what is only to look at, too.", "--strict")
    json: bool = option(False, "One JSON document, for scripts.", "--json")


@options_from
def doctor(options: DoctorOptions, settings: DoctorSettings, tls: ClientTls) -> None:
    """Check this machine: GPU, kernels, limits, network, certificates, the way to others.

    Every line says pass, warn or fail, and what to do. Exit code 0: fit, perhaps with warnings; 1:
    something failed.
    """
    from rich.console import Console

    from distca.apps.commands.usage import as_usage_error
    from distca.apps.doctor.examination import CHECKS, examine
    from distca.apps.doctor.finding import Severity, worst
    from distca.apps.doctor.report import as_json, show, summary

    # UCX logs to stdout by default, which would end up among the findings.
    os.environ.setdefault("UCX_LOG_FILE", "/dev/stderr")
    console = Console(highlight=False)
    with as_usage_error():
        around = _surroundings(options, settings, tls)
        unknown = settings.skip - CHECKS.keys()
        if unknown:
            raise ValueError(
                f"skip is {', '.join(sorted(unknown))}; the checks are {', '.join(CHECKS)}"
            )
    findings = []
    for finding in examine(around):
        findings.append(finding)
        if not options.json:
            show(finding, console)
    console.print(
        as_json(findings) if options.json else summary(findings),
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    status = worst(findings)
    if status is Severity.FAIL or (options.strict and status is Severity.WARN):
        raise typer.Exit(FAILED_EXIT_CODE)


def _surroundings(options: DoctorOptions, settings: DoctorSettings, tls: ClientTls) -> Surroundings:
    from distca.apps.doctor.cluster_probe import ClusterProbe
    from distca.apps.doctor.surroundings import Surroundings
    from distca.contract.rpc import RpcSettings

    cluster = None
    if options.control_plane:
        reach = RpcSettings(address=options.control_plane, **values_of(ClientTls, tls))
        cluster = ClusterProbe(reach, options.connect_seconds)
    return Surroundings(settings=settings, cluster=cluster)
