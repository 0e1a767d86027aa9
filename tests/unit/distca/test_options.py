"""Options come from settings classes, one each, and settings survive the way through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from data_plane.transport import TransportName
from distca.apps.train.settings import (
    DataSettings,
    DeviceName,
    ModelSettings,
    Precision,
    ServiceSettings,
    Sharding,
    TrainingSettings,
)
from distca.contract.settings import IntegritySettings, Placement, PlanRequest
from distca.options import Read, as_arguments, options_from


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Paint:
    colour: Annotated[Colour, typer.Option(help="Which.")] = Colour.RED
    coats: Annotated[int, typer.Option(help="How many.")] = 1
    shiny: Annotated[bool, typer.Option("--shiny/--no-shiny")] = False
    tin: Annotated[Path | None, typer.Option(help="From where.")] = None

    def __post_init__(self) -> None:
        if self.coats < 1:
            raise ValueError(f"coats is {self.coats}; it must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class Wall:
    width: Annotated[float, typer.Option(help="In metres.")]


def invoked(command: Callable[..., None], arguments: list[str]) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, arguments)


def run(arguments: list[str]) -> tuple[int, str, list[tuple[Paint, Wall]]]:
    received: list[tuple[Paint, Wall]] = []

    @options_from
    def command(paint: Paint, wall: Wall) -> None:
        received.append((paint, wall))

    result = invoked(command, arguments)
    return result.exit_code, result.output, received


@given(
    paint=st.builds(
        Paint,
        colour=st.sampled_from(Colour),
        coats=st.integers(1, 9),
        shiny=st.booleans(),
        tin=st.none() | st.just(Path("/tmp/a tin")),
    ),
    width=st.floats(allow_nan=False, allow_infinity=False),
)
def test_settings_survive_the_way_through_arguments(paint: Paint, width: float) -> None:
    wall = Wall(width=width)
    code, output, received = run(as_arguments(paint, wall))
    assert code == 0, output
    assert received == [(paint, wall)]


def test_missing_option_is_named() -> None:
    code, output, received = run([])
    assert (code, received) == (2, [])
    assert "--width" in output


def test_validation_of_the_class_becomes_a_usage_error() -> None:
    code, output, received = run(["--width=1", "--coats=0"])
    assert (code, received) == (2, [])
    assert "coats is 0; it must be 1 or more" in output


def test_two_classes_with_one_field_are_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other:
        coats: Annotated[int, typer.Option()] = 1

    def command(paint: Paint, other: Other) -> None:
        raise AssertionError

    command.__annotations__ = {"paint": Paint, "other": Other, "return": None}
    with pytest.raises(TypeError):
        options_from(command)


@dataclass(frozen=True, kw_only=True)
class Lock:
    key: Annotated[Path, typer.Option("--lock-key")]
    bolt: Annotated[Path, typer.Option("--lock-bolt")]
    spare: Annotated[Path | None, typer.Option("--lock-spare")] = None


@dataclass(frozen=True, kw_only=True)
class House:
    """Options of its own, those of other classes, and values that are read from a text."""

    storeys: Annotated[int, typer.Option()] = 2
    wall: Wall = field(default_factory=lambda: Wall(width=1.0))
    lock: Lock | None = None
    rooms: Annotated[tuple[Fraction, ...], typer.Option("--room"), Read(str, Fraction)] = (
        Fraction(1, 2),
    )
    address: Annotated[str, typer.Option()] = field(default_factory=lambda: "its own")
    unused: int = 7


def build_house(*arguments: str) -> House | None:
    """None for wrong usage."""
    received: list[House] = []

    @options_from
    def command(house: House) -> None:
        received.append(house)

    result = invoked(command, ["--width=3", *arguments])
    if result.exit_code == 0:
        return received[0]
    assert result.exit_code == 2, result.output
    return None


WALL = Wall(width=3.0)


def test_options_of_a_class_inside_another_are_the_command_s_too() -> None:
    assert build_house() == House(wall=WALL)
    assert build_house("--storeys=1") == House(wall=WALL, storeys=1)


def test_an_empty_text_leaves_the_default() -> None:
    assert build_house("--address=") == House(wall=WALL, address="its own")
    assert build_house("--address=here") == House(wall=WALL, address="here")


def test_values_are_read_from_text_and_what_cannot_be_read_is_wrong_usage() -> None:
    read = build_house("--room=1/3", "--room=2")
    assert read == House(wall=WALL, rooms=(Fraction(1, 3), Fraction(2)))
    assert build_house("--room=x") is None


def test_a_class_that_may_be_none_is_built_if_all_that_it_needs_is_given() -> None:
    lock = Lock(key=Path("k"), bolt=Path("b"))
    assert build_house("--lock-key=k", "--lock-bolt=b") == House(wall=WALL, lock=lock)
    for alone in ("--lock-key=k", "--lock-spare=s"):
        assert build_house(alone) is None


def test_everything_that_a_local_run_hands_to_its_trainers_reaches_them() -> None:
    """As ``distca local`` does it: every option away from its default."""
    settings = (
        ServiceSettings(
            control_plane="127.0.0.1:1",
            placement=Placement.MIXED,
            data_host="127.0.0.2",
            data_interface="lo",
            run_dir=Path("/tmp/runs/x"),
            transport=TransportName.NIXL,
            one_host=True,
            replace=True,
            start_timeout_seconds=0.5,
            connect_timeout_seconds=1.5,
            plan_timeout_seconds=2.5,
            tick_timeout_seconds=3.5,
            recovery_timeout_seconds=30.5,
            control_plane_timeout_seconds=5.5,
            metrics_port=9100,
            min_gigabytes_per_second=0.5,
            rendezvous="file:///tmp/r",
            device=DeviceName.CUDA,
        ),
        DataSettings(data=Path("/tmp/data"), max_document_tokens=9, seed=5),
        ModelSettings(hidden_size=64, layers=2, heads=8, kv_heads=8, dtype=Precision.BFLOAT16),
        TrainingSettings(
            steps=7,
            tokens_per_rank=64,
            learning_rate=0.1,
            sharding=Sharding.FSDP,
            verify=True,
            verify_every=3,
            checkpoint_every=5,
            resume=True,
            resume_or_start=True,
        ),
        PlanRequest(tolerance=0.0, planner="balanced", min_forward_tokens=1, min_backward_tokens=2),
        IntegritySettings(checksums=True, check_results=False, audit_rate=0.25),
    )
    received: list[object] = []

    @options_from
    def command(
        service: ServiceSettings,
        data: DataSettings,
        model: ModelSettings,
        training: TrainingSettings,
        plan: PlanRequest,
        integrity: IntegritySettings,
    ) -> None:
        received.extend((service, data, model, training, plan, integrity))

    result = invoked(command, as_arguments(*settings))
    assert result.exit_code == 0, result.output
    assert tuple(received) == settings
    same = [
        own.name
        for each in settings
        for own in fields(each)
        if own.default == getattr(each, own.name)
    ]
    assert same == [], "give these another value than their default above"
