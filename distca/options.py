"""Command-line options from settings classes, so that each setting is declared once.

A settings class is a frozen dataclass with fields that are made by :func:`option`, or ``Annotated``
with ``typer.Option`` where they have no default::

    layers: int | None = option(None, "Decoder layers.")

A command names the classes that it takes and receives them built and validated::

    @options_from
    def train(data: DataSettings, model: ModelSettings) -> None: ...

Fields become options in order of the classes, with their defaults, at which an empty text leaves
them; a ``ValueError`` from a class's own validation becomes a usage error. A field that is a
settings class itself stands for the options of that class; if it may be None, it is None when none
of them is given. ``PANEL`` names the panel of the help that a class's own options stand in, unless
they name another. A field whose value is no plain text or number says how it is read by a
:class:`Read`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo


@dataclasses.dataclass(frozen=True)
class Read:
    """The conversion of an option's value to that of a field.

    Attributes:
        given: type of the option's value; of each value, if the field is a tuple or a frozenset.
        convert: makes a value of the field's; a ``ValueError`` is a usage error.
    """

    given: type[Any]
    convert: Callable[[Any], Any]


Value = TypeVar("Value")

_EXTRAS = "option"


def option(default: Value, help: str, *flags: str, read: Read | None = None, **more: Any) -> Value:
    """A field of a settings class that is an option.

    Args:
        default: of the field.
        help: of the option.
        flags: how it is spelt; by default as the field.
        read: how its value is read.
        more: as of ``typer.Option``.
    """
    extras = (typer.Option(*flags, help=help, **more), *((read,) if read else ()))
    field: Any = dataclasses.field(default=default, metadata={_EXTRAS: extras})
    return cast(Value, field)


def options_from(command: Callable[..., None]) -> Callable[..., None]:
    """Gives ``command``, whose parameters are settings classes, one option for each field."""
    hints = get_type_hints(command)
    classes: dict[str, type[Any]] = {
        name: hints[name] for name in inspect.signature(command).parameters
    }
    parameters: dict[str, inspect.Parameter] = {}
    for settings in classes.values():
        for each in _options(settings):
            if each.name in parameters:
                raise TypeError(f"two settings classes have a field {each.name!r}")
            parameters[each.name] = each.parameter

    @functools.wraps(command)
    def run(**values: Any) -> None:
        try:
            built = {name: _build(settings, values) for name, settings in classes.items()}
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        command(**built)

    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    return run


def as_arguments(*settings: Any) -> list[str]:
    """The command-line arguments that build ``settings`` again; fields at their default are left
    out. The fields are plain: no :class:`Read`, no settings class."""
    arguments: list[str] = []
    for one in settings:
        for each in _options(type(one)):
            value = getattr(one, each.name)
            if each.field.default == value:
                continue
            if isinstance(value, bool):
                arguments.append(each.flag if value else each.flag.replace("--", "--no-", 1))
            elif value is not None:
                # Paths are made absolute: the reader may have another working directory.
                text = str(value.absolute()) if isinstance(value, Path) else str(value)
                arguments.append(f"{each.flag}={text}")
    return arguments


@dataclasses.dataclass(frozen=True)
class _Group:
    """A field that is a settings class itself, and may be None."""

    name: str
    settings: type[Any]
    may_be_none: bool


@dataclasses.dataclass(frozen=True)
class _Option:
    """One field that is an option.

    Attributes:
        field: of the settings class.
        kind: what the field holds.
        extras: what else the field is annotated with.
        may_lack: even if the field has no default, because its class may be left out.
    """

    field: dataclasses.Field[Any]
    kind: Any
    extras: tuple[Any, ...]
    may_lack: bool

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def required(self) -> bool:
        """True if its class cannot be built without it."""
        missing = dataclasses.MISSING
        return self.field.default is missing and self.field.default_factory is missing

    @property
    def flag(self) -> str:
        """The option's positive spelling, for example ``--one-host``."""
        for extra in self.extras:
            if isinstance(extra, OptionInfo):
                for declared in (extra.default, *(extra.param_decls or ())):
                    if isinstance(declared, str) and declared.startswith("--"):
                        return declared.split("/")[0]
        return "--" + self.name.replace("_", "-")

    @property
    def container(self) -> type[Any] | None:
        """tuple or frozenset, if the option may be given several times."""
        origin = get_origin(self.kind)
        return origin if origin in (tuple, frozenset) else None

    @property
    def read(self) -> Read | None:
        return next((extra for extra in self.extras if isinstance(extra, Read)), None)

    @property
    def parameter(self) -> inspect.Parameter:
        """As typer takes it."""
        kind: Any = self.kind
        default: Any = self.field.default
        if self.read is not None or self.container is not None:
            kind = self.read.given if self.read is not None else get_args(kind)[0]
            default = default if self.required else None
        if self.container is not None:
            kind = list[kind]
        if default is dataclasses.MISSING:
            default = inspect.Parameter.empty if self.required and not self.may_lack else None
        if default is None:
            kind = kind | None
        annotation = Annotated[(kind, *(each for each in self.extras if each is not self.read))]
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )

    def value(self, given: Any) -> dict[str, Any]:
        """The arguments to build the class with; none leaves the field at its default."""
        if given in (None, "", []) and not self.required:
            return {}
        convert = self.read.convert if self.read else lambda each: each
        if self.container is not None:
            return {self.name: self.container(convert(each) for each in given)}
        return {self.name: convert(given)}


def _members(settings: type[Any], may_lack: bool) -> Iterator[_Option | _Group]:
    hints = get_type_hints(settings, include_extras=True)
    for field in dataclasses.fields(settings):
        if not field.init:
            continue
        kind, extras = hints[field.name], field.metadata.get(_EXTRAS, ())
        if get_origin(kind) is Annotated:
            kind, *extras = get_args(kind)
        if extras:
            extras = [_in_panel(extra, _panel(settings, field.name)) for extra in extras]
            yield _Option(field, kind, tuple(extras), may_lack)
            continue
        kinds = get_args(kind) or (kind,)
        for each in kinds:
            if isinstance(each, type) and dataclasses.is_dataclass(each):
                yield _Group(field.name, each, NoneType in kinds)


def _panel(settings: type[Any], name: str) -> str | None:
    """The panel of the class that declares the field, which may be a base of ``settings``."""
    declaring = next(each for each in settings.__mro__ if name in inspect.get_annotations(each))
    panel: str | None = vars(declaring).get("PANEL")
    return panel


def _in_panel(extra: Any, panel: str | None) -> Any:
    if panel is None or not isinstance(extra, OptionInfo) or extra.rich_help_panel is not None:
        return extra
    option = copy.copy(extra)
    option.rich_help_panel = panel
    return option


def _options(settings: type[Any], may_lack: bool = False) -> Iterator[_Option]:
    for member in _members(settings, may_lack):
        if isinstance(member, _Option):
            yield member
        else:
            yield from _options(member.settings, member.may_be_none)


def _build(settings: type[Any], values: dict[str, Any]) -> Any:
    """The settings whose options have ``values``."""
    built: dict[str, Any] = {}
    for member in _members(settings, may_lack=False):
        if isinstance(member, _Option):
            built |= member.value(values[member.name])
        elif not member.may_be_none or _is_wanted(list(_options(member.settings)), values):
            built[member.name] = _build(member.settings, values)
    return settings(**built)


def _is_wanted(options: list[_Option], values: dict[str, Any]) -> bool:
    """Tests whether a class that may be left out is given."""
    required = [each for each in options if each.required]
    lacking = [each for each in required if values[each.name] is None]
    given = [each for each in options if values[each.name] not in (None, each.field.default)]
    if lacking and any(each in required for each in given):
        raise ValueError(f"{_names(required)} belong together: give both or neither")
    if lacking and given:
        raise ValueError(f"{_names(given)} needs {_names(required)}")
    return bool(given)


def _names(options: Iterable[_Option]) -> str:
    return " and ".join(each.flag.removeprefix("--").replace("-", "_") for each in options)
