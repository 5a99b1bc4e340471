"""The tail of a growing file of lines, for readers that never wait for its writer."""

from __future__ import annotations

import os
from pathlib import Path


class Tail:
    """``offset``: read up to there."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset

    def read(self, most: int = -1) -> bytes:
        """What was written since, in whole lines and at most so many bytes: an incomplete last line
        waits for the next read, and one that is longer is left out. A file that has become shorter
        was begun anew. Raises OSError.
        """
        size = os.stat(self.path).st_size
        if size == self.offset:
            return b""  # most reads find nothing new and cost only this
        self.offset = 0 if size < self.offset else self.offset
        with open(self.path, "rb") as stream:
            stream.seek(self.offset)
            data = stream.read(most)
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole) or (len(data) if len(data) == most else 0)
        return whole
