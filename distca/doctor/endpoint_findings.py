"""What is wrong where the control plane was looked for, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

from data_plane.transport import Address
from distca.contract.addresses import split_address
from distca.contract.rpc import RpcSettings
from distca.doctor.endpoint import ClientFiles, Endpoint, Speaks, listen_to

_ELSEWHERE = "give --control-plane the host:port of its gRPC (distca control-plane --listen)"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why no call gets through.

    Attributes:
        says: what is there.
        advice: what to do.
    """

    says: str
    advice: str


def try_control_plane(settings: RpcSettings) -> tuple[Endpoint, Diagnosis | None]:
    """What is at the first of its addresses, and what is wrong with that."""
    files = ClientFiles(certificate=settings.certificate_file, key=settings.key_file)
    found = listen_to(Address(*split_address("address", settings.addresses[0])), files)
    return found, diagnose(found, settings)


def diagnose(found: Endpoint, settings: RpcSettings) -> Diagnosis | None:
    """Why no call gets through to what was ``found``; None if it should."""
    with_tls = settings.ca_file is not None
    match found.speaks:
        case Speaks.NOBODY:
            return Diagnosis(
                says="nobody listens there",
                advice="start it, or give --control-plane the address that it prints",
            )
        case Speaks.UNREACHABLE:
            return Diagnosis(
                says=f"no connection: {found.said}",
                advice="mend what check dns says; then look for a firewall or NetworkPolicy",
            )
        case Speaks.GRPC if with_tls:
            return Diagnosis(
                says="it speaks gRPC without TLS, and is called with TLS",
                advice="start it with --tls-certificate and --tls-key, or leave out --tls-ca here",
            )
        case Speaks.GRPC_TLS if not with_tls:
            return Diagnosis(
                says="it speaks TLS, and is called without",
                advice="give --tls-ca the authority of its certificate",
            )
        case Speaks.CERTIFICATE_WANTED:
            return _about_own_certificate(settings)
        case Speaks.METRICS:
            return Diagnosis(says="it is the metrics port of a DistCA process", advice=_ELSEWHERE)
        case Speaks.DATA:
            return Diagnosis(
                says=f"it is the data port of a node or trainer, which speaks {found.said}",
                advice=_ELSEWHERE,
            )
        case Speaks.HTTP:
            return Diagnosis(says="it is a web server (HTTP/1)", advice=_ELSEWHERE)
        case Speaks.OTHER_TLS:
            return Diagnosis(
                says="it speaks TLS but not HTTP/2, as gRPC does",
                advice=f"{_ELSEWHERE}; if a proxy ends TLS there, let it offer h2",
            )
        case Speaks.TEXT:
            return Diagnosis(says=f"it speaks another protocol: {found.said!r}", advice=_ELSEWHERE)
        case Speaks.NOTHING:
            return Diagnosis(
                says="it accepts connections and answers neither gRPC, TLS nor HTTP",
                advice=f"{_ELSEWHERE}; if that is it, the process hangs: see its log",
            )
    return None


def _about_own_certificate(settings: RpcSettings) -> Diagnosis:
    if settings.ca_file is None:
        return Diagnosis(
            says="it speaks TLS and asks for a client certificate, and is called without TLS",
            advice="give --tls-ca, --tls-certificate and --tls-key",
        )
    if settings.certificate_file is None:
        return Diagnosis(
            says="it asks for a client certificate, and none is given",
            advice="give --tls-certificate and --tls-key",
        )
    return Diagnosis(
        says=f"it refuses the client certificate in {settings.certificate_file}",
        advice="use a certificate of an authority in its --tls-client-ca; 'distca certs show' "
        "names the issuer and the time it is good for",
    )
