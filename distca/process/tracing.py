"""OpenTelemetry traces, opt-in: where the time of a step goes, across processes.

All spans of a step share a trace whose id follows from the job and the step, as routing does: no
context has to travel with the rows. The root is the step's plan. gRPC calls are traced by
OpenTelemetry's own instrumentation. Until :func:`start` is called nothing is imported, and
:func:`record` looks at one global.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from distca import __version__
from distca.errors import DistcaError
from distca.process.plain_text import MAX_REASON_CHARACTERS, plain

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

TRACED_CALLS = (
    "RegisterServer",
    "DrainServer",
    "DeregisterServer",
    "DescribePool",
    "OpenJob",
    "CloseJob",
    "ReportStep",
    "DescribeJob",
    "GetStep",
)
"""Unary calls that are traced. Leases are renewed all the time, and a stream's span would end with
the process."""

_ids: ContextVar[tuple[int, int] | None] = ContextVar("distca_trace_ids", default=None)
"""Trace and span id of the span that is being made, where they are not random."""


_tracer: Tracer | None = None


def enabled() -> bool:
    """True if spans are recorded; to be asked first where a span costs something to describe."""
    return _tracer is not None


def record(
    name: str,
    job_id: str,
    step: int,
    *,
    began_at: float,
    ended_at: float,
    root: bool = False,
    error: str = "",
    **attributes: Any,
) -> None:
    """Adds a span to the trace of a step, if traces are on.

    Args:
        name: for example ``"distca.tick"``.
        job_id, step: whose trace.
        began_at, ended_at: ``time.monotonic()``.
        root: the other spans of the step are its children; once for each step.
        error: why it failed, if it did.
        attributes: numbers, strings and booleans; shown as ``distca.<name>``.
    """
    tracer = _tracer
    if tracer is None:
        return
    from opentelemetry.context import Context
    from opentelemetry.trace import StatusCode

    ids = _step_ids(job_id, step)
    since_epoch_ns = time.time_ns() - time.monotonic_ns()
    shown = {"job_id": job_id, "step": step, **attributes}
    token = _ids.set(ids if root else None)
    try:
        span = tracer.start_span(
            name,
            context=Context() if root else _child_of(ids),
            start_time=since_epoch_ns + int(began_at * 1e9),
            attributes={
                f"distca.{key}": plain(value) if isinstance(value, str) else value
                for key, value in shown.items()
            },
        )
    finally:
        _ids.reset(token)
    if error:
        span.set_status(StatusCode.ERROR, plain(error, MAX_REASON_CHARACTERS))
    span.end(since_epoch_ns + int(ended_at * 1e9))


def start(endpoint: str, role: str) -> None:
    """Sends traces to a collector over OTLP/gRPC until the process ends.

    ``OTEL_TRACES_SAMPLER_ARG`` is the share of steps that are traced (default 1.0), the same steps
    in every process; the other ``OTEL_*`` variables of the exporter apply too.

    Args:
        endpoint: ``http://host:port``, or ``https://`` with TLS.
        role: what this process is, for example ``"attention-node"``.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise DistcaError(
            f"traces endpoint is {endpoint!r}; it must be http://host:port or https://host:port"
        )
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        raise DistcaError(
            f"traces need OpenTelemetry ({error}); install distca with the extra otel: "
            "pip install 'distca[otel]'"
        ) from error
    start_with(OTLPSpanExporter(endpoint=endpoint), role)
    logger.info("traces go to %s", endpoint)


def start_with(exporter: SpanExporter, role: str) -> Callable[[], None]:
    """Gives spans to ``exporter``, as :func:`start` does; returns what ends it, after sending the
    spans that wait."""
    global _tracer
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

    class Ids(IdGenerator):
        """Random, but for the root of a step; not by the process's generator, which is the training
        loop's, and may be seeded alike in all ranks."""

        def generate_trace_id(self) -> int:
            ids = _ids.get()
            return secrets.randbits(128) or 1 if ids is None else ids[0]

        def generate_span_id(self) -> int:
            ids = _ids.get()
            return secrets.randbits(64) or 1 if ids is None else ids[1]

        def is_trace_id_random(self) -> bool:
            return True

    provider = TracerProvider(
        # Decided by the trace's id alone: every process keeps the same steps.
        sampler=TraceIdRatioBased(float(os.environ.get("OTEL_TRACES_SAMPLER_ARG", "1.0"))),
        resource=Resource.create(
            {"service.name": f"distca-{role}", "service.version": __version__}
        ),
        id_generator=Ids(),
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    # gRPC's instrumentation of clients knows no other provider.
    trace.set_tracer_provider(provider)
    trace_no_more_calls = _trace_calls()
    _tracer = provider.get_tracer("distca", __version__)

    def stop() -> None:
        global _tracer
        _tracer = None
        trace_no_more_calls()
        provider.shutdown()

    return stop


def _trace_calls() -> Callable[[], None]:
    """Has gRPC's clients and servers of this process traced, those made from now on; returns what
    ends it."""
    from opentelemetry.instrumentation.grpc import (
        GrpcAioInstrumentorServer,
        GrpcInstrumentorClient,
        filters,
    )

    chosen = filters.any_of(*(filters.method_name(name) for name in TRACED_CALLS))
    instrumentors = (
        GrpcInstrumentorClient(filter_=chosen),
        GrpcAioInstrumentorServer(filter_=chosen),
    )
    for instrumentor in instrumentors:
        instrumentor.instrument()

    def undo() -> None:
        for instrumentor in instrumentors:
            instrumentor.uninstrument()

    return undo


def _step_ids(job_id: str, step: int) -> tuple[int, int]:
    """Trace id and root span id of a step: 16 and 8 bytes, never 0."""
    digest = hashlib.sha256(f"{job_id}/{step}".encode()).digest()
    return int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:24]) or 1


def _child_of(ids: tuple[int, int]) -> Context:
    """The context of a span below the root of a step."""
    from opentelemetry import trace
    from opentelemetry.context import Context

    root = trace.SpanContext(
        *ids, is_remote=True, trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED)
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(root), Context())
