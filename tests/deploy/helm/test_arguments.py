"""What the chart passes to processes, and what their command line takes: kept in step."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from attention_node.settings import NodeSettings
from control_plane.planner.planners import PLANNERS
from control_plane.settings import ControlPlaneSettings
from core_attention.shape import format_shape, parse_shape
from distca.apps.doctor.examination import CHECKS
from distca.cli import app
from distca.configuration import options_of
from distca.contract.checks import MOST_SECONDS
from tests.deploy.helm.chart import (
    CHART,
    VALUE_SETS,
    Manifest,
    container,
    containers,
    environment,
    pod_specs,
    rendered,
)

ROOT_COMMAND = typer.main.get_command(app)
COMMANDS: dict[str, Any] = vars(ROOT_COMMAND)["commands"]

NOT_IN_THE_CHART = {
    "control-plane": {
        "--address-file",
        "--registrations-per-second",
        "--registration-burst",
        "--max-jobs-per-identity",
        "--max-ranks-per-identity",
        "--max-calls-per-identity",
        "--max-manifest-bytes-per-identity",
        # The token secret is mounted, and pods have no folder that outlives them.
        "--state-dir",
        # For control planes on one machine; pods elect with a Lease.
        "--leader-lock",
    },
    "attention-node": {
        "--address-file",
        "--several-hosts",
        # A pod that was killed has let go of its name; one that lives keeps it.
        "--replace",
        # Processes check the name of the service; `distca health` alone asks for localhost.
        "--tls-server-name",
        "--tls-check-seconds",
    },
}
"""Options that the chart leaves at their default; ``extraArgs`` is there for who needs them. A new
option of one of the two commands has to be put either here or into the templates."""


def command_lines() -> Iterator[tuple[str, Manifest, list[str]]]:
    """(where, container, arguments of ``distca``) of each container of all value sets."""
    for value_set in VALUE_SETS:
        for owner, spec in pod_specs(rendered(value_set)):
            for each in containers(spec):
                where = f"{value_set}: {owner}: {each['name']}"
                yield where, each, [expanded(text, each) for text in each["args"]]


def expanded(text: str, of: Manifest) -> str:
    """``text`` with $(NAME) replaced, as the kubelet does; what is known at run time only is
    10.0.0.1."""
    env = environment(of)

    def value(match: re.Match[str]) -> str:
        found = env[match[1]]
        return found if isinstance(found, str) else "10.0.0.1"

    return re.sub(r"\$\((\w+)\)", value, text)


def flags(command: str) -> set[str]:
    """All spellings of its options."""
    options = (each for each in COMMANDS[command].params if hasattr(each, "secondary_opts"))
    return {flag for each in options for flag in (*each.opts, *each.secondary_opts)}


def test_every_command_line_is_understood() -> None:
    seen = set()
    for where, _, arguments in command_lines():
        name, *rest = arguments
        try:
            COMMANDS[name].make_context(name, list(rest))
        except Exception as error:
            pytest.fail(f"{where}: {error}")
        seen.add(name)
    assert seen == {"control-plane", "attention-node", "doctor", "health", "top"}


def test_every_distca_variable_is_one_that_a_command_reads() -> None:
    for where, each, _ in command_lines():
        used = {name for name in environment(each) if name.startswith("DISTCA_")}
        known = {
            name
            for option in options_of(ROOT_COMMAND)
            if option.command in (("health",), (each["args"][0],))
            for name in (*option.variables, option.variable)
        }
        assert used <= known | {"DISTCA_LOG_LEVEL"}, where


def test_every_option_is_passed_by_the_chart_or_left_out_on_purpose() -> None:
    passed: dict[str, set[str]] = {name: set() for name in NOT_IN_THE_CHART}
    for _, each, arguments in command_lines():
        name, *rest = arguments
        if name in passed:
            passed[name] |= {text.partition("=")[0] for text in rest}
            passed[name] |= {
                flag
                for parameter in COMMANDS[name].params
                if parameter.envvar in environment(each)
                for flag in parameter.opts
            }
    for name, left_out in NOT_IN_THE_CHART.items():
        assert flags(name) - passed[name] == left_out


class Started(Exception):
    """Stops a process at its entry point, with its settings."""


def settings_of(
    arguments: list[str], env: dict[str, str], entry: str, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """The settings with which ``distca ARGUMENTS`` would run."""
    built: list[Any] = []

    def capture(settings: Any, *_: Any) -> None:
        built.append(settings)
        raise Started

    monkeypatch.setattr(entry, capture)
    result = CliRunner().invoke(app, arguments, env=env)
    assert isinstance(result.exception, Started), result.output
    return built[0]


def plain_environment(of: Manifest) -> dict[str, str]:
    return {name: value for name, value in environment(of).items() if isinstance(value, str)}


def pod_of(kind: str, value_set: str, *settings: str) -> Manifest:
    manifests = rendered(value_set, *settings)
    return next(spec for owner, spec in pod_specs(manifests) if owner.startswith(kind))


def test_values_become_settings_of_the_control_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    each = container(
        pod_of(
            "Deployment",
            "mtls-own-authority-values.yaml",
            "controlPlane.leaseSeconds=20",
            "controlPlane.planningThreads=3",
            "controlPlane.planner=balanced",
        ),
        "control-plane",
    )
    entry = "control_plane.server.run"
    settings = settings_of(each["args"], plain_environment(each), entry, monkeypatch)
    assert isinstance(settings, ControlPlaneSettings)
    assert settings.listen_address == "0.0.0.0:7700"
    assert settings.metrics_address == "0.0.0.0:7701"
    assert settings.coordinator.lease_seconds == 20
    assert settings.coordinator.planning_threads == 3
    assert settings.coordinator.default_planner == "balanced"
    assert settings.tls is not None
    files = (settings.tls.certificate_file, settings.tls.key_file, settings.tls.client_ca_file)
    names = ("tls.crt", "tls.key", "ca.crt")
    assert [str(path) for path in files] == [f"/etc/distca/tls/{name}" for name in names]
    assert str(settings.access.token_secret_file) == "/etc/distca/token/secret"


def test_values_become_settings_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    each = container(
        pod_of(
            "StatefulSet",
            "mtls-own-authority-values.yaml",
            "gpu.enabled=false",
            "attentionNode.shapes={8:2:64:float32,32:8:128:bfloat16}",
            "attentionNode.capacityRows=1000",
            "attentionNode.bufferLimitMib=64",
            "attentionNode.connectSeconds=90",
            "attentionNode.drainSeconds=45",
            "attentionNode.ports.data=9000",
            "transport=nixl:libfabric",
        ),
        "server-0",
    )
    arguments = [expanded(text, each) for text in each["args"]]
    entry = "attention_node.server.run"
    settings = settings_of(arguments, plain_environment(each), entry, monkeypatch)
    assert isinstance(settings, NodeSettings)
    assert settings.control_plane == "rel-distca-control-plane.research.svc:7700"
    assert [shape.num_heads for shape in settings.profile_shapes] == [8, 32]
    assert settings.data_host == "10.0.0.1"
    ports = (settings.data_port, settings.metrics_port)
    assert ports == (9000, 7712)
    assert settings.capacity_rows == 1000
    assert settings.buffer_limit_bytes == 64 * 2**20
    assert (settings.connect_seconds, settings.drain_seconds) == (90, 45)
    assert str(settings.certificate_file) == "/etc/distca/tls/tls.crt"
    assert not settings.one_host
    assert settings.transport == "nixl:libfabric"


@pytest.mark.parametrize(
    "shape", ["32:8:128:float16", "128:128:192/128:bfloat16", "8:4:256:bfloat16:50"]
)
def test_all_shapes_that_nodes_read_may_be_given(shape: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    shapes = schema["properties"]["attentionNode"]["properties"]["shapes"]
    assert re.fullmatch(shapes["items"]["pattern"], shape)
    assert format_shape(parse_shape(shape)) == shape


def test_the_schema_has_the_names_and_limits_of_the_code() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    planner = schema["properties"]["controlPlane"]["properties"]["planner"]
    assert planner["enum"] == ["", *PLANNERS]
    doctor = schema["properties"]["attentionNode"]["properties"]["doctor"]
    assert tuple(doctor["properties"]["skip"]["items"]["enum"]) == tuple(CHECKS)
    assert schema["definitions"]["positiveSeconds"]["maximum"] == MOST_SECONDS


def test_the_metric_that_the_pool_follows_is_one_that_nodes_export() -> None:
    listed = (CHART.parents[1] / "docs" / "metrics.md").read_text()
    for value_set in ("autoscaling-hpa-values.yaml", "autoscaling-keda-values.yaml"):
        used = set(re.findall(r"\bdistca_\w+", str(scalers(value_set))))
        assert used
        assert all(f"`{name}`" in listed for name in used)


def scalers(value_set: str) -> list[Manifest]:
    scaling = ("HorizontalPodAutoscaler", "ScaledObject")
    return [each["spec"] for each in rendered(value_set) if each["kind"] in scaling]
