"""What holds while the logs of a run are read to be judged."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from trainchaos.chaos.errors import NewerVersion
from trainchaos.harness.judge.verdict import arms as logs


def test_logs_that_cannot_be_read_leave_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*given: Any) -> Any:
        raise NewerVersion("the log", 2, 1)

    monkeypatch.setattr(logs, "_read", read)
    nothing: Any = None
    try:
        with pytest.raises(NewerVersion), logs.logs_of(nothing, nothing):
            pass
        assert gc.isenabled()
    finally:
        gc.enable()
