"""Talking to a running router: one JSON object a line, one answer a line, over a unix socket."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from lab.tun import LabError

MAX_LINE = 1 << 24
PATIENCE_S = 60.0


class Control:
    """A connection to a router."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(PATIENCE_S)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            raise LabError(f"the router does not answer at {path}: {error.strerror}; see lab list") from error
        self._file = self._socket.makefile("rb")

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send one request; LabError when the router refuses it or is gone."""
        try:
            self._socket.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
            line = self._file.readline(MAX_LINE)
        except OSError as error:
            raise LabError(f"the router did not answer {do!r}: {error}; the lab is down") from error
        if not line:
            raise LabError(f"the router is gone (asked {do!r}); the lab is down")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LabError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """Hang up."""
        self._file.close()
        self._socket.close()
