"""Every option of every command from a TOML file or from the environment.

An option has the value of its flag, else of its environment variable, else of the file that
``--config`` names, else its default. The file has a table for each command, with the flags as keys;
options before the command stand above all tables::

    log-level = "info"

    [attention-node]
    control-plane = "cp:7700"
    shape = ["32:8:128:bfloat16"]
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distca.errors import DistcaError

PREFIX = "DISTCA"

_OF_A_FLEET = tuple(f"{PREFIX}_{name}" for name in ("STATE_DIR", "TOKEN_SECRET", "LEADER_", "TLS_"))
"""Beginnings of variables that name the state, secrets and certificates of a fleet."""

_MISSPELT = 0.93
"""A variable this similar (of 1.0) to an option's is taken for a misspelling of it. Those
that Kubernetes makes of Services, such as DISTCA_ATTENTION_NODE_PORT, reach 0.912."""

_NOT_FROM_A_FILE = {"--help", "--version", "--config", "--install-completion", "--show-completion"}
"""Options that say what to do once, or where the file is."""


@dataclass(frozen=True, kw_only=True)
class ConfigOption:
    """One option of a command.

    Attributes:
        command: its names, outermost first; empty for options before the command.
        key: the flag without dashes, which is the key in a file.
        parameter: as the command-line library knows it.
    """

    command: tuple[str, ...]
    key: str
    parameter: Any

    @property
    def variable(self) -> str:
        """The environment variable of this option alone."""
        return "_".join((PREFIX, *self.command, self.key)).replace("-", "_").upper()

    @property
    def variables(self) -> list[str]:
        """All environment variables that it is read from, first one first."""
        given = self.parameter.envvar or []
        return [given] if isinstance(given, str) else list(given)

    @property
    def flag(self) -> str:
        return "--" + self.key


def options_of(command: Any, path: tuple[str, ...] = ()) -> Iterator[ConfigOption]:
    """Every option of ``command`` and its subcommands that a file may give."""
    for parameter in command.params:
        flags = [flag for flag in parameter.opts if flag.startswith("--")]
        if parameter.param_type_name == "option" and flags and flags[0] not in _NOT_FROM_A_FILE:
            yield ConfigOption(command=path, key=flags[0].removeprefix("--"), parameter=parameter)
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from options_of(subcommand, (*path, name))


def without_commands(environ: Mapping[str, str], *commands: str) -> dict[str, str]:
    """``environ`` for processes that run ``commands`` and whose options are all on their command
    lines: without the file, the variables of these commands alone, and those that say which fleet a
    service belongs to."""
    own = tuple(f"{PREFIX}_{name}_".replace("-", "_").upper() for name in commands)
    return {
        name: value
        for name, value in environ.items()
        if name != f"{PREFIX}_CONFIG" and not name.startswith((*own, *_OF_A_FLEET))
    }


class _Variables(list[str]):
    """Environment variables of an option, as errors of the command line show them: in quotes that
    stand there already."""

    def __str__(self) -> str:
        return "' or '".join(self)


def name_variables(command: Any) -> None:
    """Gives every option an environment variable, after those that it has already. Help shows only
    the latter: the others follow one rule."""
    for option in options_of(command):
        shared = option.variables
        option.parameter.show_envvar = bool(shared)
        if option.variable not in shared:
            option.parameter.envvar = _Variables([*shared, option.variable])


def misspelt_variables(command: Any, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Variables of ``environ`` that no option reads, with that of an option which is almost
    spelt so. :func:`name_variables` comes before."""
    known = {variable for option in options_of(command) for variable in option.variables}
    known.add(f"{PREFIX}_CONFIG")
    return [
        (name, near)
        for name in sorted(environ)
        if name.startswith(f"{PREFIX}_") and name not in known
        for near in difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT)
    ]


def read_config(path: Path, command: Any) -> dict[str, Any]:
    """Reads the file at ``path`` into the command-line library's defaults: by the names of
    parameters, nested like the commands.

    Raises:
        DistcaError: it cannot be read, is no TOML, or has a key that no option has; the message
            names the nearest that there is.
    """
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DistcaError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DistcaError(f"{path} is no TOML: {error}") from error
    return _defaults(given, command, (), path)


def _defaults(
    given: Mapping[str, Any], command: Any, within: tuple[str, ...], path: Path
) -> dict[str, Any]:
    options = {
        option.key: option for option in options_of(command, within) if option.command == within
    }
    commands: Mapping[str, Any] = getattr(command, "commands", {})
    defaults: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("_", "-")
        if name in commands and isinstance(value, dict):
            defaults[name] = _defaults(value, commands[name], (*within, name), path)
        elif name in options:
            where = f"{path}: {'.'.join((*within, key))}"
            defaults[options[name].parameter.name] = _text(value, where, options[name])
        elif name in commands:
            raise DistcaError(
                f"{path}: key {key!r}{_in_table(within)} is {value!r}, but names a command: "
                f"put its options into [{'.'.join((*within, name))}]"
            )
        else:
            raise DistcaError(
                f"{path}: unknown key {key!r}{_in_table(within)}; "
                + _advice(name, [*options, *commands])
            )
    return defaults


def _text(value: Any, where: str, option: ConfigOption) -> Any:
    """As it would stand on the command line, where texts become numbers and no number is cut."""
    if not option.parameter.multiple:
        return _scalar(value, where, option)
    values = value if isinstance(value, list) else [value]
    return [_scalar(each, where, option) for each in values]


def _scalar(value: Any, where: str, option: ConfigOption) -> Any:
    if isinstance(value, bool):
        return value if getattr(option.parameter, "is_flag", False) else str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    kind = "a list of texts, or one text" if option.parameter.multiple else "one text or number"
    raise DistcaError(f"{where} is {value!r}; {option.flag} takes {kind}")


def _in_table(within: tuple[str, ...]) -> str:
    return f" in [{'.'.join(within)}]" if within else ""


def _advice(name: str, valid: list[str]) -> str:
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"valid are {', '.join(sorted(valid))}"
