"""Between the types of :mod:`core_attention` and the messages of ``proto/distca/v1``.

Columns travel as packed little-endian arrays, so encoding and decoding are memory copies whatever
the number of tasks. Encoding is deterministic: equal values give equal bytes. Every function that
decodes raises :class:`WireError` and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core_attention.arrays import Int64Array
from core_attention.ca_task import MaskKind, TaskTable
from core_attention.cost_model import CostProfile
from core_attention.manifest import (
    MAX_RANK_SEGMENTS,
    NO_PARENT,
    Manifest,
    RankManifest,
    SegmentColumns,
)
from core_attention.pipelining import Pipelining
from core_attention.plan import PhaseForecast, Plan, PlanServer, PlanVerdict, SlotForecast
from core_attention.schedule import read_csv, write_csv
from core_attention.shape import AttentionShape
from core_attention.tick import MAX_NANO_BATCHES
from distca.v1 import jobs_pb2, plan_pb2, profile_pb2

Columns = dict[str, np.dtype[Any]]
"""Column names of a message and their dtypes on the wire."""

_INT32, _INT64, _FLOAT64 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f8")

_RANK_MANIFEST_COLUMNS: Columns = {
    "nano_batch": _INT32,
    "document_id": _INT64,
    "document_length": _INT32,
    "offset": _INT32,
    "length": _INT32,
}
_TREE_COLUMNS: Columns = {"document_parent": _INT64, "document_offset": _INT32}
MAX_RANK_MANIFEST_BYTES = MAX_RANK_SEGMENTS * sum(
    dtype.itemsize for dtype in (_RANK_MANIFEST_COLUMNS | _TREE_COLUMNS).values()
)
"""The most bytes of the columns."""

DOCUMENT_COLUMNS: Columns = {
    "document_id": _INT64,
    "document_length": _INT32,
    "document_nano_batch": _INT32,
}
_ROW = ("document", "offset", "length", "rank", "row")
SEGMENT_COLUMNS: Columns = {f"segment_{name}": _INT32 for name in _ROW}
CARRIED_COLUMNS: Columns = {f"carried_{name}": _INT32 for name in (*_ROW, "origin")}
TASK_COLUMNS: Columns = dict.fromkeys(("document", "q_begin", "q_end", "server"), _INT32)
_SERVER_FORECAST_COLUMNS: Columns = {
    "seconds": _FLOAT64,
    "q_rows": _INT64,
    "kv_rows": _INT64,
    "bytes_in": _INT64,
    "bytes_out": _INT64,
}

_SHAPE = ("num_heads", "num_heads_kv", "head_dim", "head_dim_v", "dtype", "softcap")
_PIPELINING = ("pipeline_ranks", "layers", "forward_seconds", "backward_seconds")

NO_RANK = -1
"""``in_place_rank`` of a pool server, on the wire."""

MAX_SCHEDULE_BYTES = 1 << 20
"""The longest schedule as CSV: a hundred thousand actions."""


class WireError(ValueError):
    """A message cannot be decoded, or a value does not fit into one; names message and field."""


def shape_to_proto(shape: AttentionShape) -> profile_pb2.AttentionShape:
    """The message of ``shape``."""
    return profile_pb2.AttentionShape(**_fields(shape, _SHAPE), mask=f"MASK_KIND_{shape.mask.name}")


def shape_from_proto(message: profile_pb2.AttentionShape) -> AttentionShape:
    """The shape in ``message``."""
    with _errors_of("AttentionShape"):
        causal = AttentionShape(**_fields(message, _SHAPE))
    return replace(causal, mask=_mask("AttentionShape", message.mask))


def pipelining_to_proto(pipelining: Pipelining) -> jobs_pb2.Pipelining:
    """The message of ``pipelining``."""
    return jobs_pb2.Pipelining(
        schedule_name=pipelining.schedule.name,
        schedule_csv=write_csv(pipelining.schedule),
        **_fields(pipelining, _PIPELINING),
    )


def pipelining_from_proto(message: jobs_pb2.Pipelining) -> Pipelining:
    """The pipelining in ``message``.

    Raises:
        WireError: a field is missing or wrong.
    """
    name, text = message.schedule_name, message.schedule_csv
    if len(text) > MAX_SCHEDULE_BYTES:
        raise WireError(
            f"schedule_csv of schedule {name!r} has {len(text)} characters; {MAX_SCHEDULE_BYTES} "
            "are the most"
        )
    with _errors_of("pipelining"):
        return Pipelining(schedule=read_csv(name, text), **_fields(message, _PIPELINING))


def profile_to_proto(profile: CostProfile) -> profile_pb2.CostProfile:
    """The message of ``profile``."""
    return profile_pb2.CostProfile(
        device=profile.device,
        kernel=profile.kernel,
        shape=shape_to_proto(profile.shape),
        q_tokens=profile.q_tokens.tolist(),
        kv_tokens=profile.kv_tokens.tolist(),
        forward_seconds=profile.forward_seconds.ravel().tolist(),
        backward_seconds=profile.backward_seconds.ravel().tolist(),
    )


def profile_from_proto(message: profile_pb2.CostProfile) -> CostProfile:
    """The profile in ``message``."""
    grid = (len(message.q_tokens), len(message.kv_tokens))
    for name in ("forward_seconds", "backward_seconds"):
        n_values = len(getattr(message, name))
        if n_values != grid[0] * grid[1]:
            raise WireError(
                f"CostProfile.{name} has {n_values} values; the grid of {grid[0]} q_tokens and "
                f"{grid[1]} kv_tokens needs {grid[0] * grid[1]}"
            )
    with _errors_of("CostProfile"):
        return CostProfile(
            device=message.device,
            kernel=message.kernel,
            shape=shape_from_proto(message.shape),
            q_tokens=np.array(message.q_tokens, np.int64),
            kv_tokens=np.array(message.kv_tokens, np.int64),
            forward_seconds=np.array(message.forward_seconds, np.float64).reshape(grid),
            backward_seconds=np.array(message.backward_seconds, np.float64).reshape(grid),
        )


def rank_manifest_to_proto(manifest: RankManifest) -> plan_pb2.RankManifest:
    """The message of ``manifest``, nano-batch after nano-batch."""
    _check_n_segments(len(manifest.columns.length))
    has_tree = (manifest.columns.document_parent != NO_PARENT).any()
    specs = _RANK_MANIFEST_COLUMNS | (_TREE_COLUMNS if has_tree else {})
    return plan_pb2.RankManifest(
        step=manifest.step,
        rank=manifest.rank,
        n_nano_batches=manifest.n_nano_batches,
        **_pack_all("RankManifest", specs, manifest.columns._asdict()),
    )


def rank_manifest_from_proto(message: plan_pb2.RankManifest) -> RankManifest:
    """The manifest in ``message``; segments of a nano-batch keep their order.

    Raises:
        WireError: it has too many segments, a column is truncated or shorter than another, a
            nano-batch is out of range, or a segment is empty or leaves its document.
    """
    name = "RankManifest"
    _check_n_segments(len(message.length) // _RANK_MANIFEST_COLUMNS["length"].itemsize)
    if not 1 <= message.n_nano_batches <= MAX_NANO_BATCHES:
        raise WireError(
            f"{name}.n_nano_batches is {message.n_nano_batches}; valid are 1 to {MAX_NANO_BATCHES}"
        )
    has_tree = message.document_parent or message.document_offset
    columns = _unpack_all(
        name, message, _RANK_MANIFEST_COLUMNS | (_TREE_COLUMNS if has_tree else {})
    )
    if not has_tree:
        columns |= {"document_parent": np.full_like(columns["length"], NO_PARENT)}
        columns |= {"document_offset": np.zeros_like(columns["length"])}
    document_end = columns["document_length"]
    _check_values(name, columns, "nano_batch", 0, message.n_nano_batches - 1)
    _check_values(name, columns, "length", 1, document_end)
    _check_values(name, columns, "document_offset", 0, document_end - columns["length"])
    _check_values(
        name, columns, "offset", columns["document_offset"], document_end - columns["length"]
    )
    nano_batch = columns["nano_batch"]
    if (nano_batch[1:] < nano_batch[:-1]).any():
        order = np.argsort(nano_batch, kind="stable")
        columns = {field: column[order] for field, column in columns.items()}
    return RankManifest.from_columns(
        _step(name, message.step), message.rank, message.n_nano_batches, SegmentColumns(**columns)
    )


def _check_n_segments(n: int) -> None:
    if n > MAX_RANK_SEGMENTS:
        raise WireError(
            f"RankManifest has {n} segments; a rank may hold {MAX_RANK_SEGMENTS} in a step: drop "
            "or join short documents"
        )


def plan_to_proto(plan: Plan, job_id: str) -> plan_pb2.Plan:
    """The message of ``plan``, whole or a slice."""
    return plan_pb2.Plan(
        job_id=job_id,
        epoch=plan.epoch,
        manifest=_manifest_to_proto(plan.manifest),
        servers=[
            plan_pb2.PlanServer(
                server_id=server.server_id,
                in_place_rank=NO_RANK if server.in_place_rank is None else server.in_place_rank,
                data_address=server.address,
            )
            for server in plan.servers
        ],
        forward=_tasks_to_proto(plan.forward),
        backward=_tasks_to_proto(plan.backward),
        mask=f"MASK_KIND_{plan.mask.name}",
        planner=plan.planner,
        reason=plan.reason,
        verdict=f"PLAN_VERDICT_{plan.verdict.name if plan.verdict else 'UNSPECIFIED'}",
        forward_forecast=_forecast_to_proto(plan.forward_forecast),
        backward_forecast=_forecast_to_proto(plan.backward_forecast),
        slots=_slots_to_proto(plan.slots),
    )


def plan_from_proto(message: plan_pb2.Plan) -> Plan:
    """The plan in ``message``, whole or a slice, with all its invariants checked."""
    manifest = _manifest_from_proto(message.manifest)
    n_servers = len(message.servers)
    mask = _mask("Plan", message.mask)
    with _errors_of("Plan"):
        return Plan(
            manifest=manifest,
            epoch=message.epoch,
            servers=tuple(_server_from_proto(server) for server in message.servers),
            forward=_tasks_from_proto("Plan.forward", message.forward, mask),
            backward=_tasks_from_proto("Plan.backward", message.backward, mask),
            mask=mask,
            planner=message.planner,
            reason=message.reason,
            verdict=_verdict(message.verdict),
            forward_forecast=_forecast_from_proto(message, "forward_forecast", manifest, n_servers),
            backward_forecast=_forecast_from_proto(
                message, "backward_forecast", manifest, n_servers
            ),
            slots=_slots_from_proto(message, manifest.n_ranks, n_servers),
        )


def first_tick_to_bytes(first_tick: Int64Array) -> bytes:
    """The column of :class:`StepPlanned`; empty where every document begins with its step."""
    return _pack("StepPlanned.first_tick", first_tick, _INT32) if first_tick.any() else b""


def first_tick_from_bytes(data: bytes, n_documents: int) -> Int64Array:
    """``[n_documents]`` the first tick of each document of a plan."""
    if not data:
        return np.zeros(n_documents, dtype=np.int64)
    column = _unpack("StepPlanned.first_tick", data, _INT32).astype(np.int64)
    if len(column) != n_documents or (column < 0).any():
        raise WireError(
            f"StepPlanned.first_tick has {len(column)} values, the least {column.min(initial=0)}; "
            f"there must be one, 0 or more, for each of the plan's {n_documents} documents"
        )
    return column


def _manifest_to_proto(manifest: Manifest) -> plan_pb2.Manifest:
    specs = DOCUMENT_COLUMNS | SEGMENT_COLUMNS | CARRIED_COLUMNS
    return plan_pb2.Manifest(
        step=manifest.step,
        n_ranks=manifest.n_ranks,
        n_nano_batches=manifest.n_nano_batches,
        whole=manifest.whole,
        **_pack_all("Manifest", specs, _fields(manifest, specs)),
    )


def _manifest_from_proto(message: plan_pb2.Manifest) -> Manifest:
    name = "Plan.manifest"
    documents = _unpack_all(name, message, DOCUMENT_COLUMNS)
    segments = _unpack_all(name, message, SEGMENT_COLUMNS)
    carried = _unpack_all(name, message, CARRIED_COLUMNS)
    with _errors_of(name):
        return Manifest(
            step=_step(name, message.step),
            n_ranks=message.n_ranks,
            n_nano_batches=message.n_nano_batches,
            whole=message.whole,
            **documents,
            **segments,
            **carried,
        )


def _tasks_to_proto(tasks: TaskTable) -> plan_pb2.TaskTable:
    return plan_pb2.TaskTable(**_pack_all("TaskTable", TASK_COLUMNS, _fields(tasks, TASK_COLUMNS)))


def _tasks_from_proto(name: str, message: plan_pb2.TaskTable, mask: MaskKind) -> TaskTable:
    return TaskTable(**_unpack_all(name, message, TASK_COLUMNS), mask=mask)


def _server_from_proto(message: plan_pb2.PlanServer) -> PlanServer:
    if message.in_place_rank < NO_RANK:
        raise WireError(
            f"PlanServer.in_place_rank of {message.server_id!r} is {message.in_place_rank}; it "
            f"must be a rank, or {NO_RANK} for a pool server"
        )
    return PlanServer(
        server_id=message.server_id,
        in_place_rank=None if message.in_place_rank == NO_RANK else message.in_place_rank,
        address=message.data_address,
    )


def _mask(message: str, number: int) -> MaskKind:
    try:
        return MaskKind(number)
    except ValueError:
        valid = ", ".join(f"{kind.value} ({kind.name})" for kind in MaskKind)
        raise WireError(
            f"{message}.mask is {number}; this release knows {valid}: do all members run one "
            "release?"
        ) from None


def _verdict(number: int) -> PlanVerdict | None:
    """None for one that this release does not know: it is for people and metrics."""
    name = _VERDICTS.get(number)
    return None if name is None else PlanVerdict[name]


_VERDICTS = {
    plan_pb2.PlanVerdict.Value(f"PLAN_VERDICT_{verdict.name}"): verdict.name
    for verdict in PlanVerdict
}


def _forecast_to_proto(forecast: PhaseForecast | None) -> plan_pb2.PhaseForecast | None:
    if forecast is None:
        return None
    specs: Columns = {"home_seconds": _FLOAT64} | _SERVER_FORECAST_COLUMNS
    return plan_pb2.PhaseForecast(**_pack_all("PhaseForecast", specs, _fields(forecast, specs)))


def _forecast_from_proto(
    plan: plan_pb2.Plan, field: str, manifest: Manifest, n_servers: int
) -> PhaseForecast | None:
    if not plan.HasField(field):
        return None
    message, name = getattr(plan, field), f"Plan.{field}"
    home_shape = (manifest.n_nano_batches, manifest.n_ranks)
    return PhaseForecast(
        home_seconds=_unpack_matrix(name, message, "home_seconds", _FLOAT64, home_shape),
        **{
            column: _unpack_matrix(
                name, message, column, dtype, (manifest.n_nano_batches, n_servers)
            )
            for column, dtype in _SERVER_FORECAST_COLUMNS.items()
        },
    )


def _slots_to_proto(slots: SlotForecast | None) -> plan_pb2.SlotForecast | None:
    if slots is None:
        return None
    specs = dict.fromkeys(_SLOT_COLUMNS, _FLOAT64)
    return plan_pb2.SlotForecast(
        n_halves=len(slots.seconds),
        **_pack_all("SlotForecast", specs, _fields(slots, specs)),
    )


def _slots_from_proto(plan: plan_pb2.Plan, n_ranks: int, n_servers: int) -> SlotForecast | None:
    if not plan.HasField("slots"):
        return None
    n_halves, columns = plan.slots.n_halves, {}
    for field, n_members in zip(_SLOT_COLUMNS, (n_ranks, n_servers, n_servers), strict=True):
        column = _unpack(f"Plan.slots.{field}", getattr(plan.slots, field), _FLOAT64)
        if not n_halves * n_members or len(column) % (n_halves * n_members):
            raise WireError(
                f"Plan.slots.{field} has {len(column)} values for {n_halves} halves and "
                f"{n_members} members; there must be one for each of them in each slot"
            )
        columns[field] = column.reshape(n_halves, -1, n_members)
    if len({column.shape[1] for column in columns.values()}) > 1:
        slots = {field: column.shape[1] for field, column in columns.items()}
        raise WireError(f"Plan.slots has columns of different numbers of slots: {slots}")
    return SlotForecast(**columns)


_SLOT_COLUMNS = ("home_seconds", "base_seconds", "seconds")


def _fields(owner: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in names}


def _pack_all(message: str, specs: Columns, values: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: _pack(f"{message}.{name}", values[name], dtype) for name, dtype in specs.items()}


def _pack(field: str, values: Any, dtype: np.dtype[Any]) -> bytes:
    """The bytes of ``values``, row-major; integers are checked to fit into ``dtype``."""
    if dtype.kind == "f":
        return np.asarray(values, dtype=dtype).tobytes()
    try:
        wide = np.asarray(values, dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise WireError(f"{field} holds a value that is no 64-bit integer: {error}") from error
    limits = np.iinfo(dtype)
    bad = (wide < limits.min) | (wide > limits.max)
    if bad.any():
        raise WireError(
            f"{field} holds {wide[bad].flat[0]}; valid values are {limits.min} to {limits.max}"
        )
    return wide.astype(dtype).tobytes()


def _unpack_all(name: str, message: Any, specs: Columns) -> dict[str, Int64Array]:
    """The integer columns ``specs`` of ``message``, all of one length, widened to int64."""
    columns = {
        field: _unpack(f"{name}.{field}", getattr(message, field), dtype).astype(np.int64)
        for field, dtype in specs.items()
    }
    lengths = {field: len(column) for field, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise WireError(f"{name} has columns of different lengths: {lengths}")
    return columns


def _unpack_matrix(
    name: str, message: Any, field: str, dtype: np.dtype[Any], shape: tuple[int, int]
) -> NDArray[Any]:
    column = _unpack(f"{name}.{field}", getattr(message, field), dtype)
    if len(column) != shape[0] * shape[1]:
        raise WireError(
            f"{name}.{field} has {len(column)} values; {shape[0]} nano-batches of {shape[1]} need "
            f"{shape[0] * shape[1]}"
        )
    return column.reshape(shape)


def _unpack(field: str, data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise WireError(
            f"{field} has {len(data)} bytes, which is no multiple of {dtype.itemsize}: the column "
            "is truncated"
        )
    return np.frombuffer(data, dtype=dtype)


def _check_values(
    name: str,
    columns: Mapping[str, Int64Array],
    field: str,
    low: int | Int64Array,
    high: int | Int64Array,
) -> None:
    """Every value of the column lies in the closed range ``[low, high]``."""
    column = columns[field]
    bad = (column < low) | (column > high)
    if bad.any():
        at, highest = int(bad.argmax()), np.broadcast_to(high, column.shape)
        raise WireError(
            f"{name}.{field}: segment {at} (document {columns['document_id'][at]}, length "
            f"{columns['document_length'][at]}) has {column[at]}; valid are "
            f"{np.broadcast_to(low, column.shape)[at]} to {highest[at]}"
        )


def _step(name: str, step: int) -> int:
    if step > np.iinfo(np.int64).max:
        raise WireError(f"{name}.step is {step}; valid are 0 to {np.iinfo(np.int64).max}")
    return step


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Any mistake in the values of ``name`` becomes a :class:`WireError`."""
    try:
        yield
    except WireError:
        raise
    except ValueError as error:
        raise WireError(f"{name}: {error}") from error
