"""Command-line options from settings classes, so that each option is declared once.

A settings class is a frozen dataclass whose fields are ``Annotated`` with ``typer.Option``. A
command names the classes that it takes and receives them built and validated::

    @options_from
    def train(data: DataSettings, model: ModelSettings) -> None: ...

Fields become options in order of the classes, with their defaults; a ``ValueError`` from a class's
own validation becomes a usage error.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo


def options_from(command: Callable[..., None]) -> Callable[..., None]:
    """Gives ``command``, whose parameters are settings classes, one option for each field."""
    hints = get_type_hints(command)
    classes: dict[str, type[Any]] = {
        name: hints[name] for name in inspect.signature(command).parameters
    }
    parameters: dict[str, inspect.Parameter] = {}
    for settings in classes.values():
        for field, annotation in _fields(settings):
            if field.name in parameters:
                raise TypeError(f"two settings classes have a field {field.name!r}")
            parameters[field.name] = _parameter(field, annotation)

    @functools.wraps(command)
    def run(**values: Any) -> None:
        built = {}
        for name, settings in classes.items():
            own = {field.name: values[field.name] for field, _ in _fields(settings)}
            try:
                built[name] = settings(**own)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error
        command(**built)

    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    return run


def as_arguments(*settings: Any) -> list[str]:
    """The command-line arguments that build ``settings`` again; fields at their default are left
    out."""
    arguments: list[str] = []
    for each in settings:
        for field, annotation in _fields(type(each)):
            value = getattr(each, field.name)
            if field.default == value:
                continue
            flag = _flags(field.name, annotation)
            if isinstance(value, bool):
                arguments.append(flag if value else flag.replace("--", "--no-", 1))
            elif value is not None:
                # Paths are made absolute: the reader may have another working directory.
                text = str(value.absolute()) if isinstance(value, Path) else str(value)
                arguments.append(f"{flag}={text}")
    return arguments


def _fields(settings: type[Any]) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """The fields that are options, with their annotations."""
    hints = get_type_hints(settings, include_extras=True)
    for field in dataclasses.fields(settings):
        if field.init and get_origin(hints[field.name]) is Annotated:
            yield field, hints[field.name]


def _parameter(field: dataclasses.Field[Any], annotation: Any) -> inspect.Parameter:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    required = default is dataclasses.MISSING
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else default,
        annotation=annotation,
    )


def _flags(name: str, annotation: Any) -> str:
    """The option's positive spelling, for example ``--span-ranks``."""
    for extra in get_args(annotation)[1:]:
        if isinstance(extra, OptionInfo):
            for declared in (extra.default, *(extra.param_decls or ())):
                if isinstance(declared, str) and declared.startswith("--"):
                    return declared.split("/")[0]
    return "--" + name.replace("_", "-")
