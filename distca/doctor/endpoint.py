"""What listens at an address, found out by trying: gRPC's own error says little more than that
there is no connection."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from data_plane.greeting import HEADER_BYTES, BadGreeting, decode_header
from data_plane.nixl.link import receive_exactly
from data_plane.transport import Address
from distca.contract.timeouts import default_seconds
from distca.doctor.responder import HELLO, OPEN_SECRET
from distca.process.plain_text import plain

_FIRST_WORDS_SECONDS = default_seconds("first_words_seconds")
"""For each attempt; a server that answers takes milliseconds."""

_UNASKED_SECONDS = 0.5
"""How long is waited for what a server says before it is asked, such as a banner."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of HTTP/2 says first: RFC 9113, 3.4, with empty SETTINGS."""

_SETTINGS_FRAME = 4
_FRAME_HEADER_BYTES = 9
_SHOWN_CHARACTERS = 60
_METRICS_BYTES = 2**20


class Speaks(StrEnum):
    """What answers at an address."""

    NOBODY = "nobody"
    UNREACHABLE = "unreachable"
    GRPC = "gRPC without TLS"
    GRPC_TLS = "gRPC with TLS"
    CERTIFICATE_WANTED = "TLS, for clients with a certificate"
    OTHER_TLS = "TLS without HTTP/2"
    METRICS = "metrics"
    HTTP = "HTTP/1"
    DATA = "rows"
    TEXT = "another protocol"
    NOTHING = "nothing"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What answered, and its own words where they tell more."""

    speaks: Speaks
    said: str = ""


@dataclass(frozen=True, kw_only=True)
class ClientFiles:
    """The certificate that this side shows, if it has one."""

    certificate: Path | None = None
    key: Path | None = None


def listen_to(address: Address, files: ClientFiles) -> Endpoint:
    """What speaks at ``address``; every attempt is a connection of its own and has a deadline.

    Args:
        address: of any server.
        files: shown where TLS asks for a certificate.
    """
    try:
        unasked = _answer(address, b"", _UNASKED_SECONDS)
    except ConnectionRefusedError:
        return Endpoint(speaks=Speaks.NOBODY)
    except OSError as error:
        return Endpoint(speaks=Speaks.UNREACHABLE, said=str(error.strerror or error))
    if unasked and not _is_settings(unasked):
        if _answers_as_nixl(address):
            return Endpoint(speaks=Speaks.DATA, said="nixl")
        return Endpoint(speaks=Speaks.TEXT, said=_shown(unasked))
    try:
        answer = unasked or _answer(address, _PREFACE, _FIRST_WORDS_SECONDS)
    except OSError:
        # It has closed at once, as a TLS server does that is not greeted by TLS.
        answer = b""
    if _is_settings(answer):
        return Endpoint(speaks=Speaks.GRPC)
    return (
        _by_tls(address, files)
        or _by_http(address)
        or (Endpoint(speaks=Speaks.TEXT, said=_shown(answer)) if answer else None)
        or _by_ucx(address)
        or Endpoint(speaks=Speaks.NOTHING)
    )


def _answer(address: Address, words: bytes, seconds: float) -> bytes:
    """The first bytes after ``words``; none if none come in time, or the connection ends."""
    with socket.create_connection((address.host, address.port), _FIRST_WORDS_SECONDS) as link:
        if words:
            link.sendall(words)
        link.settimeout(seconds)
        try:
            return link.recv(4096)
        except TimeoutError:
            return b""


def _is_settings(answer: bytes) -> bool:
    """Whether it begins with HTTP/2's SETTINGS on stream 0, as a server's words must."""
    return (
        len(answer) >= _FRAME_HEADER_BYTES
        and answer[3] == _SETTINGS_FRAME
        and answer[5:_FRAME_HEADER_BYTES] == bytes(4)
    )


def _by_tls(address: Address, files: ClientFiles) -> Endpoint | None:
    """What a TLS server turns out to be; None if it is none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Whether its certificate is good is for check certificates; nothing is told to it here.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if files.certificate is not None:
        context.load_cert_chain(files.certificate, files.key)
    shaken = False
    try:
        with (
            socket.create_connection((address.host, address.port), _FIRST_WORDS_SECONDS) as raw,
            context.wrap_socket(raw, server_hostname=address.host) as link,
        ):
            shaken = True
            if link.selected_alpn_protocol() != "h2":
                return Endpoint(speaks=Speaks.OTHER_TLS)
            link.sendall(_PREFACE)
            # With TLS 1.3 a server refuses a client's certificate after the handshake.
            accepted = _is_settings(link.recv(4096))
            return Endpoint(speaks=Speaks.GRPC_TLS if accepted else Speaks.CERTIFICATE_WANTED)
    except ssl.SSLError as error:
        reason = str(error.reason or "")
        if "ALERT_NO_APPLICATION_PROTOCOL" in reason:
            return Endpoint(speaks=Speaks.OTHER_TLS)
        if "ALERT" in reason or shaken:
            return Endpoint(speaks=Speaks.CERTIFICATE_WANTED, said=reason)
    except OSError:
        if shaken:
            return Endpoint(speaks=Speaks.CERTIFICATE_WANTED)
    return None


def _by_http(address: Address) -> Endpoint | None:
    """Whether it is a web server, and one of our metrics; None if it is none."""
    link = http.client.HTTPConnection(address.host, address.port, timeout=_FIRST_WORDS_SECONDS)
    try:
        link.request("GET", "/metrics")
        response = link.getresponse()
        page = _read(response)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        link.close()
    ours = b"\ndistca_" in page or b"# HELP distca_" in page
    return Endpoint(speaks=Speaks.METRICS if ours else Speaks.HTTP)


def _read(response: http.client.HTTPResponse) -> bytes:
    """Some of the page; a server that never ends gets no more time than others."""
    deadline = time.monotonic() + _FIRST_WORDS_SECONDS
    page = b""
    while len(page) < _METRICS_BYTES and time.monotonic() < deadline:
        part = response.read1(65536)
        if not part:
            break
        page += part
    return page


def _answers_as_nixl(address: Address) -> bool:
    """Whether what listens speaks the greeting of the nixl transport."""
    try:
        with socket.create_connection((address.host, address.port), _FIRST_WORDS_SECONDS) as link:
            deadline = time.monotonic() + _FIRST_WORDS_SECONDS
            decode_header(receive_exactly(link, HEADER_BYTES, deadline))
    except (OSError, BadGreeting):
        return False
    return True


def _by_ucx(address: Address) -> Endpoint | None:
    """Whether it is the listener of the ucxx transport; None if not, or nothing here can tell."""
    from data_plane.transport import HandshakeRejected, TransportError
    from data_plane.transports import open_transport

    try:
        with closing(open_transport("ucxx", device="cpu", one_host=False)) as transport:
            transport.connect(address, HELLO, _FIRST_WORDS_SECONDS, secret=OPEN_SECRET)
    except HandshakeRejected:
        pass
    except (ImportError, TransportError, RuntimeError, ValueError):
        return None
    return Endpoint(speaks=Speaks.DATA, said="ucxx")


def _shown(answer: bytes) -> str:
    first = answer.decode("utf-8", errors="backslashreplace").strip().partition("\n")[0]
    return plain(first.strip(), _SHOWN_CHARACTERS)
