"""From settings to what is simulated: documents, setup and method."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np

from control_plane.planner import DEFAULT_PLANNER
from control_plane.planner.planners import PLANNERS
from control_plane.planner.planning import Planner, PlanningOptions
from core_attention.arrays import Int64Array
from core_attention.cost_model import CostProfile
from core_attention.errors import ScheduleError
from core_attention.manifest import MAX_DOCUMENT_TOKENS
from core_attention.schedule import Schedule, read_csv
from core_attention.schedule_orders import SCHEDULES, Order
from distca.apps.preview.settings import (
    ClusterSettings,
    FleetSettings,
    Homes,
    LengthsSettings,
    ModelSizes,
    PlannerSettings,
)
from distca.apps.simulator.cluster import ClusterSpec
from distca.apps.simulator.disaggregated import Method
from distca.apps.simulator.homes import planned_homes
from distca.apps.simulator.length_files import read_lengths
from distca.apps.simulator.lengths import sample_lengths
from distca.apps.simulator.model import ModelSpec, preset
from distca.apps.simulator.packing import pack_in_order, split_long, take_steps
from distca.apps.simulator.schedules import fitting_orders
from distca.apps.simulator.setup import Setup, stage_layers
from distca.apps.simulator.verdict import Remedy
from distca.contract.checks import check_least, check_range
from distca.contract.settings import Placement

LARGE_TOLERANCE = 0.1
"""From here on a still larger tolerance costs more than it saves."""
_KILO, _GIGA, _TERA, _MICRO = 1e3, 1e9, 1e12, 1e-6
_SHIPPED_PROFILE = "h200-llama3-8b.json"


def build_model(settings: ModelSizes) -> ModelSpec:
    """The preset with the numbers that the user changed, which have its fields' names."""
    sizes = {each.name for each in fields(ModelSpec)} & vars(settings).keys()
    changed = {name: size for name in sizes if (size := getattr(settings, name)) is not None}
    return replace(preset(settings.model), **changed)


def build_cluster(settings: ClusterSettings, n_gpus: int) -> ClusterSpec:
    """The machines of ``n_gpus`` GPUs."""
    return ClusterSpec(
        n_gpus=n_gpus,
        tensor_parallel=settings.tensor_parallel,
        gpus_per_host=settings.gpus_per_host,
        gpu_bandwidth_bytes_per_second=settings.bandwidth_gbps * _GIGA,
        host_bandwidth_bytes_per_second=settings.host_bandwidth_gbps * _GIGA,
        message_latency_seconds=settings.latency_us * _MICRO,
        linear_flops_per_second=settings.linear_tflops * _TERA,
    )


def load_profile(settings: ClusterSettings) -> CostProfile:
    """The user's profile, or the one that ships with the simulator."""
    if settings.profile is None:
        with as_file(files("distca.apps.simulator") / "profiles" / _SHIPPED_PROFILE) as path:
            return CostProfile.load(path)
    try:
        return CostProfile.load(settings.profile)
    except OSError as error:
        raise ValueError(f"profile {settings.profile} cannot be read: {error}") from error


def build_setup(
    model: ModelSizes,
    cluster: ClusterSettings,
    n_gpus: int,
    n_stages: int = 1,
    n_microbatches: int = 1,
    gradient_sync_seconds: float = 0.0,
) -> Setup:
    """The job that is simulated."""
    return Setup(
        model=build_model(model),
        cluster=build_cluster(cluster, n_gpus),
        profile=load_profile(cluster),
        tokens_per_rank=cluster.tokens_per_rank,
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        recompute_linear=model.recompute,
        gradient_sync_seconds=gradient_sync_seconds,
    )


def build_method(settings: PlannerSettings, setup: Setup) -> Method:
    """The planner, its options and the homes."""
    options = PlanningOptions(tolerance=settings.tolerance)
    planned = settings.homes is Homes.PLANNED
    return Method(
        planner=choose_planner(settings.planner or DEFAULT_PLANNER),
        options=options,
        pack=planned_homes(setup.rank_profile, options) if planned else pack_in_order,
        n_nano_batches=settings.nano_batches,
    )


def unused_remedies(settings: PlannerSettings, may_plan_homes: bool = True) -> list[Remedy]:
    """Remedies against waits for communication that are not in use yet."""
    used = {
        Remedy.PLANNED_HOMES: settings.homes is Homes.PLANNED or not may_plan_homes,
        Remedy.TOLERANCE: settings.tolerance >= LARGE_TOLERANCE,
    }
    return [remedy for remedy in Remedy if not used.get(remedy, False)]


def describe_layout(
    planner: PlannerSettings, fleet: FleetSettings, setup: Setup, n_batches: int
) -> str:
    """The caption of a picture of the first batch."""
    rows = setup.tokens_per_rank // planner.nano_batches
    return (
        f"Batch 0 of {n_batches}: {fleet.ranks} ranks of {setup.tokens_per_rank} tokens, "
        f"{rows} in each of {planner.nano_batches} nano-batches, homes {planner.homes}, "
        f"{fleet.placement} servers"
    )


def preview_notes(
    planner: PlannerSettings, setup: Setup, lengths: LengthsSettings, estimated: bool
) -> list[str]:
    """Notes on all batches; ``estimated`` says whether their lengths were."""
    shape = setup.model.attention_shape
    notes = [
        _nano_batch_note(planner, setup.tokens_per_rank),
        f"A moved query has {shape.q_row_bytes / _KILO:.1f} KB and its output "
        f"{shape.o_row_bytes / _KILO:.1f} KB; the key and value of a token of its context have "
        f"{shape.kv_row_bytes / _KILO:.1f} KB (forward, one layer).",
    ]
    if estimated:
        each = f"{lengths.bytes_per_token:g} UTF-8 bytes a token"
        notes.insert(0, f"Lengths are estimated: {each}.")
    return notes


def _nano_batch_note(planner: PlannerSettings, tokens_per_rank: int) -> str:
    if planner.nano_batches == 1:
        return (
            "One nano-batch: steps as if nothing were computed while messages travel; ways to hide "
            "them are below. --nano-batches 2 hides them, but halves the tokens that a rank holds "
            "in a tick."
        )
    half = tokens_per_rank // 2
    return (
        f"Two nano-batches (ping-pong): in a tick a rank holds {half} of its {tokens_per_rank} "
        f"tokens, so a longer document lies on several ranks. --nano-batches 1 shows the other "
        "case, as if nothing hid communication."
    )


def check_homes(planner: PlannerSettings, fleet: FleetSettings) -> None:
    """Raises ``ValueError`` if homes are to be planned for ranks without their own server."""
    if planner.homes is Homes.PLANNED and fleet.placement is Placement.POOL:
        raise ValueError(
            "homes is planned with placement pool; planned homes are for ranks that attend to "
            "their own tokens: choose homes packed, or placement in-place or mixed"
        )


def choose_planner(name: str) -> Planner:
    """The planner called ``name``."""
    if name not in PLANNERS:
        raise ValueError(f"planner is {name!r}; valid are {', '.join(sorted(PLANNERS))}")
    return PLANNERS[name]


def build_orders(text: str, setup: Setup) -> tuple[dict[str, Order], list[str]]:
    """The schedules that the user asked for, and why some of "all" are left out."""
    if text.strip() == "all":
        return fitting_orders(setup)
    orders = {}
    for part in (part.strip() for part in text.split(",")):
        order = SCHEDULES[part] if part in SCHEDULES else _order_of_file(part)
        schedule = order(setup.n_stages, setup.n_microbatches)
        stage_layers(setup, schedule)
        if schedule.name in orders:
            raise ValueError(
                f"schedules: {part} is called {schedule.name}, and so is another one; name each "
                "once, and rename files"
            )
        orders[schedule.name] = order
    return orders, []


def check_pipeline_options(n_stages: int, schedules: str, in_flight: float | None) -> None:
    """Raises ``ValueError`` if pipelines are asked for, and there is one stage."""
    for name, value, default in (("schedules", schedules, "all"), ("in_flight", in_flight, None)):
        if n_stages == 1 and value != default:
            raise ValueError(
                f"{name} is {value}, and stages is 1; it is for pipelines: give 2 stages or more, "
                f"or leave {name} out"
            )


def _order_of_file(name: str) -> Order:
    path = Path(name)
    if path.suffix != ".csv":
        raise ValueError(
            f"schedules: {name!r} is unknown; valid are all, {', '.join(SCHEDULES)}, and files "
            "that end in .csv"
        )
    try:
        schedule = read_csv(path.stem, path.read_text(encoding="utf-8"))
    except ScheduleError as error:
        raise ScheduleError(f"schedules: {name}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"schedules: {name} cannot be read: {error}") from error

    def order(n_ranks: int, n_microbatches: int) -> Schedule:
        if (schedule.n_ranks, schedule.n_microbatches) != (n_ranks, n_microbatches):
            raise ValueError(
                f"schedules: {name} is for {schedule.n_ranks} ranks and {schedule.n_microbatches} "
                f"microbatches; stages is {n_ranks}, microbatches is {n_microbatches}"
            )
        return schedule

    return order


def parse_counts(name: str, text: str) -> list[int]:
    """Whole numbers with commas between, such as ``8,64``."""
    counts = []
    for part in text.split(","):
        try:
            counts.append(int(part))
        except ValueError:
            raise ValueError(
                f"{name}: {part.strip()!r} is no integer; give numbers with commas between"
            ) from None
        check_range(name, counts[-1], 1, 2**31)
    return counts


def build_batches(
    settings: LengthsSettings, step_tokens: int, default_max_length: int
) -> tuple[list[Int64Array], bool]:
    """The documents of each batch, and whether their lengths were estimated from texts."""
    check_least(settings, batches=1, seed=0)
    max_length = settings.max_length if settings.max_length is not None else default_max_length
    check_range("max_length", max_length, 1, MAX_DOCUMENT_TOKENS)
    if (settings.lengths is None) == (settings.distribution is None):
        raise ValueError(
            "give either --lengths, a file, or --distribution, prolong or pretrain"
            + (", not both" if settings.lengths is not None else "")
        )
    if settings.distribution is not None:
        _check_no_file_options(settings)
        return _drawn(settings, settings.distribution, step_tokens, max_length), False
    assert settings.lengths is not None
    found = read_lengths(settings.lengths, settings.field, settings.bytes_per_token)
    lengths = found.lengths
    if settings.shuffle:
        lengths = np.random.default_rng(settings.seed).permutation(lengths)
    lengths = split_long(lengths, max_length)
    return take_steps(lengths, settings.batches, step_tokens), found.estimated


def check_no_lengths(settings: LengthsSettings) -> None:
    """Raises ``ValueError`` if documents are given besides groups."""
    if settings.lengths is not None or settings.distribution is not None:
        raise ValueError("groups is given besides lengths or distribution; give one of them")


def _check_no_file_options(settings: LengthsSettings) -> None:
    used = ("field", settings.field, None), ("shuffle", settings.shuffle, True)
    for name, value, default in used:
        if value != default:
            raise ValueError(
                f"{name} is {value}, and lengths are drawn from distribution "
                f"{settings.distribution}; it is for a file: leave it out, or give --lengths"
            )


def _drawn(
    settings: LengthsSettings, distribution: str, step_tokens: int, max_length: int
) -> list[Int64Array]:
    try:
        return [
            np.asarray(sample_lengths(distribution, step_tokens, max_length, settings.seed + i))
            for i in range(settings.batches)
        ]
    except ValueError as error:
        raise ValueError(f"distribution: {error}") from error
