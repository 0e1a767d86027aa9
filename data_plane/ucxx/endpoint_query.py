"""Asks UCX about an endpoint: both socket addresses, and the transports it uses.

ucxx does not wrap ``ucp_ep_query``, and nothing else shows whether UCX chose shared memory, NVLink
or TCP. The structures are those of ``ucp/api/ucp.h``; their ``field_mask`` keeps them stable.
"""

from __future__ import annotations

import ctypes
import functools
import socket
from dataclasses import dataclass

_LOCAL_ADDRESS, _REMOTE_ADDRESS, _TRANSPORTS = 1 << 1, 1 << 2, 1 << 3
_MAX_TRANSPORTS = 32
_SOCKADDR_STORAGE_BYTES = 128


class _TransportEntry(ctypes.Structure):
    _fields_ = (("transport_name", ctypes.c_char_p), ("device_name", ctypes.c_char_p))


class _Transports(ctypes.Structure):
    _fields_ = (
        ("entries", ctypes.POINTER(_TransportEntry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
    )


class _EndpointAttributes(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_sockaddr", ctypes.c_uint64 * (_SOCKADDR_STORAGE_BYTES // 8)),
        ("remote_sockaddr", ctypes.c_uint64 * (_SOCKADDR_STORAGE_BYTES // 8)),
        ("transports", _Transports),
        ("user_data", ctypes.c_void_p),
    )


@dataclass(frozen=True, kw_only=True)
class EndpointInfo:
    """UCX's facts about an endpoint.

    Attributes:
        local: (IP address, port) of this side; ("", 0) when unknown.
        remote: the same of the peer.
        transports: names in UCX's order without repeats, for example ("tcp", "posix").
    """

    local: tuple[str, int]
    remote: tuple[str, int]
    transports: tuple[str, ...]


def query_endpoint(handle: int) -> EndpointInfo:
    """Queries the ``ucp_ep_h`` behind ``handle``; owner thread only, endpoint not closed."""
    entries = (_TransportEntry * _MAX_TRANSPORTS)()
    attributes = _EndpointAttributes(
        field_mask=_LOCAL_ADDRESS | _REMOTE_ADDRESS | _TRANSPORTS,
        transports=_Transports(entries, _MAX_TRANSPORTS, ctypes.sizeof(_TransportEntry)),
    )
    if _ucp_library().ucp_ep_query(ctypes.c_void_p(handle), ctypes.byref(attributes)) != 0:
        return EndpointInfo(local=("", 0), remote=("", 0), transports=())
    used = entries[: attributes.transports.num_entries]
    names = [entry.transport_name.decode() for entry in used if entry.transport_name]
    return EndpointInfo(
        local=_decode_sockaddr(bytes(attributes.local_sockaddr)),
        remote=_decode_sockaddr(bytes(attributes.remote_sockaddr)),
        transports=tuple(dict.fromkeys(names)),
    )


@functools.cache
def _ucp_library() -> ctypes.CDLL:
    """The libucp that ucxx has loaded into this process; by its name, the linker finds that one."""
    library = ctypes.CDLL("libucp.so.0")
    library.ucp_ep_query.restype = ctypes.c_int
    return library


def _decode_sockaddr(raw: bytes) -> tuple[str, int]:
    family = int.from_bytes(raw[:2], "little")
    port = int.from_bytes(raw[2:4], "big")
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, raw[4:8]), port
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, raw[8:24]), port
    return "", 0
