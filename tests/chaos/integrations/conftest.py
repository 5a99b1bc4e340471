"""For all integrations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.integrations.heard import Heard, listening


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Heard]:
    with listening(tmp_path) as found:
        yield found
