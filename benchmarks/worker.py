"""A worker's side of a measurement: what it was told at start, and questions from the measuring process.

Standard library only, because a rival's interpreter imports it too. One JSON object per line on a loopback socket.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from typing import Any


class Parent:
    """The measuring process. ``python -m MODULE PORT SETTINGS`` is how it starts a worker.

    Attributes:
        settings: what the worker was told at start.
    """

    def __init__(self) -> None:
        self._lines = socket.create_connection(("127.0.0.1", int(sys.argv[1]))).makefile("rw", encoding="utf-8")
        self.settings: dict[str, Any] = json.loads(sys.argv[2])

    def say(self, answer: Any = None) -> None:
        """Answer a question; the first answer, unasked, says that the worker is ready."""
        self._lines.write(json.dumps(answer) + "\n")
        self._lines.flush()

    def questions(self) -> Iterator[dict[str, Any]]:
        """Every question until the measuring process is done."""
        for line in self._lines:
            yield json.loads(line)
