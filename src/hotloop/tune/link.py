"""The line between the tuner and a trial's process: JSON objects over a Unix socket, one a line."""

from __future__ import annotations

import json
import socket
from typing import Any

__all__ = ["Link", "LinkClosedError"]


class LinkClosedError(Exception):
    """The other end is gone."""


class Link:
    """One end of the line."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""

    @classmethod
    def connect(cls, path: str) -> Link:
        """The trial's end."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        return cls(connection)

    def send(self, message: dict[str, Any]) -> None:
        """Send one object.

        Raises:
            LinkClosedError: nobody is there to take it.
        """
        try:
            self._socket.settimeout(None)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise LinkClosedError(str(error)) from None

    def receive(self, limit_s: float | None = None) -> dict[str, Any] | None:
        """The next object, or None if none came within `limit_s`.

        Raises:
            LinkClosedError: the other end is gone, and nothing it sent is left.
        """
        while b"\n" not in self._buffer:
            self._socket.settimeout(limit_s)
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                return None
            except OSError as error:
                raise LinkClosedError(str(error)) from None
            if not data:
                raise LinkClosedError("closed")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
