"""Frames on a stream socket: u32 length, then the bytes; small control messages are JSON, file descriptors ride
along.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

LENGTH = struct.Struct("<I")
# A reply carries the request's nonce, so that one written before the request was known cannot be taken for it.
NONCE_BYTES = 16
HEADER = struct.Struct("<16sBI")  # nonce, status, payload length
OK, FAILED, UNSENDABLE = 0, 1, 2  # answered; the candidate raised; its value cannot cross


def send_message(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    data = json.dumps(message, separators=(",", ":")).encode()
    data = LENGTH.pack(len(data)) + data
    if fds:
        sent = socket.send_fds(sock, [data], list(fds))
        data = data[sent:]
    if data:
        sock.sendall(data)


def receive_message(sock: socket.socket, max_fds: int = 0) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and its descriptors; None at the end of the stream."""
    fds: list[int] = []
    head = b""
    while len(head) < LENGTH.size:
        if max_fds:
            chunk, new, _flags, _address = socket.recv_fds(sock, LENGTH.size - len(head), max_fds)
            fds += new
        else:
            chunk = sock.recv(LENGTH.size - len(head))
        if not chunk:
            return None, fds
        head += chunk
    (length,) = LENGTH.unpack(head)
    body = b""
    while len(body) < length:
        chunk = sock.recv(length - len(body))
        if not chunk:
            return None, fds
        body += chunk
    return json.loads(body), fds


def read_exactly(fd: int, count: int) -> bytearray:
    """``count`` bytes from a descriptor. Raises EOFError."""
    data = bytearray(count)
    view = memoryview(data)
    got = 0
    while got < count:
        chunk = os.readv(fd, [view[got:]])
        if chunk == 0:
            raise EOFError
        got += chunk
    return data


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
