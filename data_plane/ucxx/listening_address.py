"""Ties a listener that is bound to every address of this machine to one of them.

ucxx offers no way to say which address its listener binds, so it binds 0.0.0.0. A socket filter
makes the kernel drop whatever comes to another address, before UCX sees any of it; to the outside
the port looks closed there. It needs no privileges.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct

from data_plane.interfaces import ANY_ADDRESS
from data_plane.process_sockets import listener_on

_SO_ATTACH_FILTER = 26
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
"""Classic BPF (linux/filter.h): BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K, BPF_RET."""
_IP_DESTINATION = 0xFFF00000 + 16
"""SKF_NET_OFF, that is -2**20: the IPv4 header; the destination is 16 bytes into it."""
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
        destination = int(ipaddress.IPv4Address(ip))
        instructions = b"".join(
            struct.pack("=HBBI", code, if_true, if_false, operand)
            for code, if_true, if_false, operand in (
                (_LOAD_WORD, 0, 0, _IP_DESTINATION),
                (_JUMP_IF_EQUAL, 0, 1, destination),
                (_RETURN, 0, 0, _WHOLE_PACKET),
                (_RETURN, 0, 0, 0),
            )
        )
        memory = ctypes.create_string_buffer(instructions, len(instructions))
        program = _Program(len(instructions) // 8, ctypes.addressof(memory))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))
