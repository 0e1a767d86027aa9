"""An OpenTelemetry collector on loopback, for tests: it keeps what it gets."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it was sent."""

    service: str
    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    attributes: dict[str, str]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans over OTLP.

    Attributes:
        endpoint: where; set once it listens.
        spans: in the order of their arrival.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[CollectedSpan] = []

    def Export(  # noqa: N802 - named by the protocol
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            (service,) = (
                attribute.value.string_value
                for attribute in resource.resource.attributes
                if attribute.key == "service.name"
            )
            for scope in resource.scope_spans:
                self.spans += [
                    CollectedSpan(
                        service,
                        span.name,
                        span.trace_id,
                        span.span_id,
                        span.parent_span_id,
                        {each.key: each.value.string_value for each in span.attributes},
                    )
                    for span in scope.spans
                ]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(1.0).wait(5.0)
