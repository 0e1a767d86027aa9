"""Options from flags, environment, file and defaults, in this order; mistakes in a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from control_plane import server
from control_plane.settings import ControlPlaneSettings
from distca.cli import command_line
from distca.configuration import (
    misspelt_variables,
    options_of,
    read_config,
    without_commands,
)
from distca.errors import DistcaError
from tools.configuration_page import PAGE, printed

Start = Callable[..., ControlPlaneSettings | None]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Runs the command line; the settings that a control plane was to be started with."""
    started: list[ControlPlaneSettings] = []
    monkeypatch.setattr(server, "run", started.append)

    def start(*arguments: str, **environ: str) -> ControlPlaneSettings | None:
        started.clear()
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit):
                command_line()(list(arguments), prog_name="distca")
        return started[0] if started else None

    return start


def write(folder: Path, text: str) -> Path:
    path = folder / "distca.toml"
    path.write_text(text)
    return path


def test_flag_environment_file_default_in_this_order(tmp_path: Path, start: Start) -> None:
    path = write(tmp_path, '[control-plane]\nlisten = "file:1"\nlease_seconds = 20\n')
    config = f"--config={path}"
    variable = {"DISTCA_CONTROL_PLANE_LISTEN": "environment:1"}

    def listens(*arguments: str, **environ: str) -> str:
        settings = start(*arguments, **environ)
        assert settings is not None
        return settings.listen_address

    assert listens("control-plane") == "0.0.0.0:7700"
    assert listens(config, "control-plane") == "file:1"
    assert listens("control-plane", DISTCA_CONFIG=str(path)) == "file:1"
    assert listens(config, "control-plane", **variable) == "environment:1"
    assert listens(config, "control-plane", "--listen=flag:1", **variable) == "flag:1"
    settings = start(config, "control-plane")
    assert settings is not None
    assert settings.coordinator.lease_seconds == 20.0


def test_a_shared_variable_comes_before_that_of_the_command(start: Start) -> None:
    both = {"DISTCA_STATE_DIR": "/shared", "DISTCA_CONTROL_PLANE_STATE_DIR": "/own"}
    settings = start("control-plane", **both)
    assert settings is not None
    assert settings.state_dir == Path("/shared")
    settings = start("control-plane", DISTCA_CONTROL_PLANE_STATE_DIR="/own")
    assert settings is not None
    assert settings.state_dir == Path("/own")


@pytest.mark.parametrize(
    "text",
    [
        '[control-plane]\nlsten = "a:1"',
        "[control-plan]\n",
        "[certs.make]\ndais = 3\n",
        "qqq = 1",
        "[control-plane]\nlisten = [1]",
        "[train]\nsteps = {a = 1}",
        "listen =",
        'config = "other.toml"',
        'control-plane = "cp:7700"',
        "[certs]\nmake = 1",
    ],
)
def test_what_is_wrong_in_a_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DistcaError):
        read_config(write(tmp_path, text), command_line())


def test_a_file_that_is_not_there_and_a_number_that_does_not_fit_are_wrong_usage(
    tmp_path: Path, start: Start
) -> None:
    for path in ("/nowhere/a.toml", write(tmp_path, "[control-plane]\nplanning-threads = 1.5\n")):
        assert start(f"--config={path}", "control-plane") is None


def test_lists_and_flags_come_as_the_command_line_has_them(tmp_path: Path) -> None:
    text = """
    [attention-node]
    shape = ["32:8:128:bfloat16", "1:1:8:float32"]
    one-host = true
    [doctor]
    skip = "ucx"
    """
    read = read_config(write(tmp_path, text), command_line())
    assert read["attention-node"] == {
        "profile_shapes": ["32:8:128:bfloat16", "1:1:8:float32"],
        "one_host": True,
    }
    assert read["doctor"] == {"skip": ["ucx"]}


def test_every_option_has_a_variable_that_no_other_option_reads() -> None:
    options = list(options_of(command_line()))
    assert len(options) > 200
    own = Counter(option.variable for option in options)
    assert max(own.values()) == 1
    for option in options:
        assert option.variables[-1] == option.variable
        assert not own.keys() & set(option.variables[:-1])


def test_a_local_run_keeps_the_variables_of_other_commands_from_its_processes() -> None:
    environ = {
        "DISTCA_CONFIG": "f",
        "DISTCA_TRAIN_STEPS": "1",
        "DISTCA_STATE_DIR": "of a fleet",
        "DISTCA_TLS_KEY": "k",
        "DISTCA_LEADER_LEASE": "l",
        "DISTCA_TOKEN_SECRET": "s",
        "DISTCA_METRICS_PORT": "2",
        "PATH": "p",
    }
    assert without_commands(environ, "train") == {"DISTCA_METRICS_PORT": "2", "PATH": "p"}


def test_the_page_is_printed_from_the_commands() -> None:
    page = PAGE.read_text()
    assert printed(page) == page, "run `make configuration-page`"
    row = next(line for line in page.splitlines() if line.startswith("| `listen`"))
    assert printed(page.replace(row, "")) == page


def test_variables_that_are_almost_those_of_options_are_warned_of(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    assert start("control-plane", DISTCA_CONTROL_PLANE_LEASE_SECOND="4") is not None
    assert "DISTCA_CONTROL_PLANE_LEASE_SECOND is ignored" in caplog.text
    assert "did you mean DISTCA_CONTROL_PLANE_LEASE_SECONDS?" in caplog.text
    caplog.clear()
    assert start("control-plane", DISTCA_TLS_CERTIFICAT="/cert") is not None
    assert "did you mean DISTCA_TLS_CERTIFICATE?" in caplog.text


def test_variables_of_others_are_not_taken_for_misspelt_ones() -> None:
    service = {
        "DISTCA_ATTENTION_NODE_PORT": "tcp://10.0.0.1:7700",
        "DISTCA_ATTENTION_NODE_SERVICE_HOST": "10.0.0.1",
        "DISTCA_ATTENTION_NODE_SERVICE_PORT": "7700",
        "DISTCA_CONTROL_PLANE_PORT": "tcp://10.0.0.1:7700",
        "DISTCA_CONTROL_PLANE_PORT_7701_TCP_PORT": "7701",
        "DISTCA_CONTROL_PLANE_SERVICE_PORT_METRICS": "7701",
    }
    good = {"DISTCA_CONFIG": "f", "DISTCA_TRAIN_STEPS": "3", "DISTCA_TAG": "1", "PATH": "/"}
    assert misspelt_variables(command_line(), service | good) == []
