"""Lets a listening socket ignore new connections of some hosts, in the kernel: they cost this process nothing.

A classic BPF program on the socket drops the packets of these hosts. Connections that stand have sockets of their own
and go on. Linux only, and needs no right.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
from collections.abc import Sequence

MAX_HOSTS = 48  # of each family: a jump of the program reaches 255 instructions
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # of Linux; the module socket has no names for them
_NETWORK_HEADER = 0xFFF00000  # offsets from here on are those in the header of IP, not in that of TCP
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
_KEEP, _DROP = 0xFFFFFFFF, 0
_SOURCE_V4, _SOURCE_V6 = _NETWORK_HEADER + 12, _NETWORK_HEADER + 8
_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, value


def ignore(listener: socket.socket, hosts: Sequence[str]) -> None:
    """Ignore new connections of these hosts, in the form of `caller.host_of`, and of no other. Raises OSError.

    At most MAX_HOSTS of each family count, the first ones.
    """
    if not hosts:
        listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        return
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program(hosts))
    kept = ctypes.create_string_buffer(code)  # until the kernel has copied it
    listener.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(code) // 8, ctypes.addressof(kept))
    )


def program(hosts: Sequence[str]) -> list[_Instruction]:
    """What decides about a packet."""
    parts = [host.partition(":")[::2] for host in hosts]
    v4 = [int(ipaddress.IPv4Address(name)) for kind, name in parts if kind == "ipv4"][:MAX_HOSTS]
    v6 = [int(ipaddress.IPv6Network(name).network_address) >> 64 for kind, name in parts if kind == "ipv6"][:MAX_HOSTS]
    of_v4: list[_Instruction] = [(_LOAD_WORD, 0, 0, _SOURCE_V4)]
    for address in v4:
        of_v4 += [(_JUMP_IF_EQUAL, 0, 1, address), (_RETURN, 0, 0, _DROP)]
    of_v6: list[_Instruction] = []
    for network in v6:
        of_v6 += [
            (_LOAD_WORD, 0, 0, _SOURCE_V6),
            (_JUMP_IF_EQUAL, 0, 3, network >> 32),
            (_LOAD_WORD, 0, 0, _SOURCE_V6 + 4),
            (_JUMP_IF_EQUAL, 0, 1, network & 0xFFFFFFFF),
            (_RETURN, 0, 0, _DROP),
        ]
    keep = (_RETURN, 0, 0, _KEEP)
    version: list[_Instruction] = [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_JUMP_IF_EQUAL, 0, len(of_v4) + 1, 4),
    ]
    return [*version, *of_v4, keep, *of_v6, keep]
