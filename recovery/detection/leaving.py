"""Distinguishes a rank that does not leave an aborted generation from one that is about to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trainchaos.recovery.detection.hangs import DISK, STOPPED, SUSPECT_AT, UNHEARD, measured_of
from trainchaos.recovery.detection.pace import Pace
from trainchaos.recovery.detection.silence import PollTime, Silence
from trainchaos.recovery.process.starvation import Pulse
from trainchaos.recovery.transport.progress_counters import Mark


@dataclass(kw_only=True)
class LeaveWatch:
    """Which members of an aborted generation do not leave it. Each has as long as its phase may
    take, from its last sign of life on; see ``Pace.leave_s``.
    """

    pace: Pace
    least_s: float
    suspects: set[str] = field(default_factory=set)
    """As in ``HangDetector``."""
    _last_look_s: float | None = None
    _silences: dict[str, Silence] = field(default_factory=dict)

    def late(
        self,
        now_s: float,
        marks: Mapping[str, Mark],
        kernel: Callable[[str], str],
        pulse: Callable[[str], Pulse],
    ) -> dict[str, dict[str, Any]]:
        """Members that are late by now, and the measurements of each (``Hang.measured``). Arguments
        as for ``HangDetector.look``.
        """
        look = PollTime.after(self._last_look_s, now_s, len(marks))
        self._last_look_s = now_s
        self.suspects.clear()
        late = {}
        for name, mark in marks.items():
            silence = self._silences.get(name)
            # A member on a silent node may have left; its node comes back and reports it, or is
            # given up.
            if silence is None or silence.mark != mark or kernel(name) == UNHEARD:
                self._silences[name] = Silence(mark=mark)
                continue
            limit = self.pace.leave_s(mark, name, self.least_s)
            silence.lags(look, limit, partial(pulse, name), self.pace.works)
            state = kernel(name)
            if state in STOPPED:
                limit = self.least_s
            elif state == DISK:
                limit *= self.pace.limits.disk_factor
            if silence.behind_s > SUSPECT_AT * limit:
                self.suspects.add(name)
            if silence.behind_s > limit:
                late[name] = measured_of(silence.behind_s, limit, mark.last_seq)
        return late
