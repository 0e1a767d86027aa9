"""Listeners of UCX that take connections to one address alone, or from some alone.

UCX offers no way to say so. A socket filter makes the kernel drop everything else before UCX sees
any of it; to the outside the port looks closed. It needs no privileges.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
from collections.abc import Collection
from contextlib import suppress

from data_plane.interfaces import ANY_ADDRESS
from data_plane.process_sockets import listener_on

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
"""Classic BPF (linux/filter.h): BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K, BPF_RET."""
_IP_SOURCE, _IP_DESTINATION = 0xFFF00000 + 12, 0xFFF00000 + 16
"""SKF_NET_OFF, that is -2**20: the IPv4 header; the addresses are 12 and 16 bytes into it."""
_WHOLE_PACKET = 0xFFFFFFFF


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def accept_only_at(ip: str, port: int) -> None:
    """Makes this process's listener on 0.0.0.0:``port`` take connections to ``ip`` alone.

    Connections that it has accepted before are not affected.

    Args:
        ip: an IPv4 address of this machine.
        port: of a socket of this process that listens.

    Raises:
        OSError: this process has no such listener, or the kernel took no filter.
    """
    with listener_on(ANY_ADDRESS, port) as listener:
        _take_only(listener, _IP_DESTINATION, [ip])


def accept_only_from(ips: Collection[str], port: int) -> None:
    """Makes this process's listener on ``port`` take connections from ``ips`` alone; it may be
    called again with others. If the kernel takes no such filter, the listener has none.

    Raises:
        OSError: this process has no such listener, or the kernel took no filter, as of too many.
    """
    with listener_on(None, port) as listener:
        try:
            _take_only(listener, _IP_SOURCE, ips)
        except OSError:
            with suppress(OSError):
                listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            raise


def _take_only(listener: socket.socket, field: int, ips: Collection[str]) -> None:
    program = [(_LOAD_WORD, 0, 0, field)]
    for ip in ips:
        program += [
            (_JUMP_IF_EQUAL, 0, 1, int(ipaddress.IPv4Address(ip))),
            (_RETURN, 0, 0, _WHOLE_PACKET),
        ]
    program.append((_RETURN, 0, 0, 0))
    raw = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    memory = ctypes.create_string_buffer(raw, len(raw))
    filter_ = _Program(len(program), ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(filter_))
