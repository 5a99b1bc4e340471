"""What drivers report in a file, or faults in their place (``health-event``)."""

from __future__ import annotations

from collections.abc import Sequence

from trainchaos.recovery.health.readings.reading import Place, Problem, Problems, Reading
from trainchaos.recovery.health.readings.reports import ReportFile

UNITS = {"xid": "number", "ecc": "errors", "thermal": "degC", "nvlink": "errors"}


class ReportedSource:
    """One reading for each report: metric ``reported_xid`` and the like, its value the report's
    code; ``text``: nvml or injected.
    """

    name = "reported"

    def __init__(self, file: ReportFile) -> None:
        self._file = file
        self._problems = Problems(self.name)

    def read(self, now_s: float) -> Sequence[Reading]:
        """Reports since the last call."""
        try:
            reports = self._file.take()
        except OSError as error:
            self._problems.note("reports", "", error)
            return []
        return [
            Reading(
                where=Place(report.rank, report.node, report.device),
                metric=f"reported_{report.what}",
                value=float(report.code),
                unit=UNITS[report.what],
                time_s=now_s,
                text=report.source,
            )
            for report in reports
        ]

    def problems(self) -> Sequence[Problem]:
        """New problems."""
        return self._problems.take()
