"""Kills a waiting spare."""

from __future__ import annotations

from typing import ClassVar, Literal

from trainchaos.chaos.faults._kill import KillsProcess


class SpareKill(KillsProcess):
    """SIGKILL to a waiting spare: it must be replaced before it is needed, without disturbing
    training. Real.

    Its targets are spares, whatever the scenario's ``role`` says. Landed: the kernel reports the
    process ended by that signal, and its supervisor had not sent it.
    """

    harmless: ClassVar[bool] = True
    role: ClassVar[Literal["worker", "spare"] | None] = "spare"
