"""Finds out what listens where the control plane was looked for: gRPC's own error says
little more than that there is no connection."""

from __future__ import annotations

import http.client
import socket
import ssl
from dataclasses import dataclass
from enum import StrEnum

from data_plane.transport import Address
from distca.contract.addresses import split_address
from distca.contract.rpc import RpcSettings
from distca.contract.timeouts import default_seconds

_FIRST_WORDS_SECONDS = default_seconds("first_words_seconds")
"""A limit for each attempt; a server that answers takes milliseconds."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first words of an HTTP/2 client: RFC 9113, 3.4, with empty SETTINGS."""

_SETTINGS_FRAME = 4
_FRAME_HEADER_BYTES = 9
_METRICS_BYTES = 2**16

_ELSEWHERE = "give --control-plane the host:port of its gRPC (distca control-plane --listen)"


class Speaks(StrEnum):
    """The kinds of what answers at an address."""

    NOBODY = "nobody"
    UNREACHABLE = "unreachable"
    GRPC = "gRPC without TLS"
    GRPC_TLS = "gRPC with TLS"
    CERTIFICATE_WANTED = "TLS, for clients with a certificate"
    REFUSED = "TLS, with a certificate that is refused here"
    METRICS = "metrics"
    OTHER = "no gRPC"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The answering process, and why no call gets through to it.

    Attributes:
        speaks: what it is.
        says: what is wrong; empty if a call should get through.
        advice: what to do.
    """

    speaks: Speaks
    says: str = ""
    advice: str = ""


def try_control_plane(settings: RpcSettings) -> Endpoint:
    """Tries the first of its addresses; every attempt is a connection of its own and has a
    deadline."""
    address = Address(*split_address("address", settings.addresses[0]))
    try:
        answer = _answer(address)
    except ConnectionRefusedError:
        return Endpoint(
            speaks=Speaks.NOBODY,
            says="nobody listens there",
            advice="start it, or give --control-plane the address that it prints",
        )
    except ConnectionError:
        # It has closed at once, as a TLS server does that is not greeted by TLS.
        answer = b""
    except OSError as error:
        return Endpoint(
            speaks=Speaks.UNREACHABLE,
            says=f"no connection: {error.strerror or error}",
            advice="mend what check dns says; then look for a firewall or NetworkPolicy",
        )
    if _is_settings(answer):
        return _plaintext(settings)
    return _by_tls(address, settings) or _by_http(address)


def _plaintext(settings: RpcSettings) -> Endpoint:
    if settings.ca_file is None:
        return Endpoint(speaks=Speaks.GRPC)
    return Endpoint(
        speaks=Speaks.GRPC,
        says="it speaks gRPC without TLS, and is called with TLS",
        advice="start it with --tls-certificate and --tls-key, or leave out --tls-ca here",
    )


def _answer(address: Address) -> bytes:
    """The first bytes after HTTP/2's preface; none if none come in time."""
    with socket.create_connection((address.host, address.port), _FIRST_WORDS_SECONDS) as link:
        link.sendall(_PREFACE)
        try:
            return link.recv(4096)
        except TimeoutError:
            return b""


def _is_settings(answer: bytes) -> bool:
    """Tests for HTTP/2's SETTINGS on stream 0, with which a server's words must begin."""
    return (
        len(answer) >= _FRAME_HEADER_BYTES
        and answer[3] == _SETTINGS_FRAME
        and answer[5:_FRAME_HEADER_BYTES] == bytes(4)
    )


def _by_tls(address: Address, settings: RpcSettings) -> Endpoint | None:
    """Identifies a TLS server; None if it is none."""
    context = ssl.create_default_context(cafile=settings.ca_file)
    if settings.ca_file is None:
        # It is called without TLS. No secret is sent here.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if settings.certificate_file is not None:
        context.load_cert_chain(settings.certificate_file, settings.key_file)
    name = settings.server_name or address.host
    shaken = False
    try:
        with (
            socket.create_connection((address.host, address.port), _FIRST_WORDS_SECONDS) as raw,
            context.wrap_socket(raw, server_hostname=name) as link,
        ):
            shaken = True
            if link.selected_alpn_protocol() != "h2":
                return _other("it speaks TLS but not HTTP/2, as gRPC does")
            link.sendall(_PREFACE)
            # With TLS 1.3 a server refuses a client's certificate after the handshake.
            if _is_settings(link.recv(4096)):
                return _with_tls(settings)
    except ssl.SSLCertVerificationError as error:
        return Endpoint(
            speaks=Speaks.REFUSED,
            says=f"its certificate is refused: {error.verify_message}",
            advice=f"it must be signed by an authority in {settings.ca_file} and be good for "
            f"{name}; if it has another name, give that with --tls-server-name",
        )
    except ssl.SSLError as error:
        if "ALERT_NO_APPLICATION_PROTOCOL" in str(error.reason):
            return _other("it speaks TLS but not HTTP/2, as gRPC does")
        if not shaken and "ALERT" not in str(error.reason):
            return None
    except OSError:
        if not shaken:
            return None
    return _certificate_wanted(settings)


def _with_tls(settings: RpcSettings) -> Endpoint:
    if settings.ca_file is not None:
        return Endpoint(speaks=Speaks.GRPC_TLS)
    return Endpoint(
        speaks=Speaks.GRPC_TLS,
        says="it speaks TLS, and is called without",
        advice="give --tls-ca the authority of its certificate",
    )


def _certificate_wanted(settings: RpcSettings) -> Endpoint:
    if settings.ca_file is None:
        says = "it speaks TLS and asks for a client certificate, and is called without TLS"
        advice = "give --tls-ca, --tls-certificate and --tls-key"
    elif settings.certificate_file is None:
        says = "it asks for a client certificate, and none is given"
        advice = "give --tls-certificate and --tls-key"
    else:
        says = f"it refuses the client certificate in {settings.certificate_file}"
        advice = (
            "use a certificate of an authority in its --tls-client-ca; 'distca certs show' names "
            "the issuer and the time it is good for"
        )
    return Endpoint(speaks=Speaks.CERTIFICATE_WANTED, says=says, advice=advice)


def _by_http(address: Address) -> Endpoint:
    """A web server, one of our metrics, or something else."""
    link = http.client.HTTPConnection(address.host, address.port, timeout=_FIRST_WORDS_SECONDS)
    try:
        link.request("GET", "/metrics")
        page = link.getresponse().read(_METRICS_BYTES)
    except (OSError, http.client.HTTPException):
        return _other("it answers neither gRPC, TLS nor HTTP; if it is the right one, it hangs")
    finally:
        link.close()
    if b"# HELP distca_" in page:
        says = "it is the metrics port of a DistCA process"
        return Endpoint(speaks=Speaks.METRICS, says=says, advice=_ELSEWHERE)
    return _other("it is a web server (HTTP/1)")


def _other(says: str) -> Endpoint:
    return Endpoint(speaks=Speaks.OTHER, says=says, advice=_ELSEWHERE)
