"""Which reports and alarms say that a device is about to fail, so that work is moved off it.

A report that is not credible costs nothing to ignore: if the device fails after all, that is a
failure like any other. One that is wrongly believed costs a move at a step boundary.
"""

from __future__ import annotations

from trainchaos.recovery.health.readings.reports import HealthReport
from trainchaos.recovery.health.readings.signs import Sign
from trainchaos.recovery.playbook.book import playbook
from trainchaos.recovery.playbook.entry import Entry

ALARMS = {
    "ecc-uncorrected": "memory errors that were not corrected",
    "device-lost": "the driver does not find the device any more",
}
"""Alarms that announce a failure. The others say that something is slow, hot or unusual: a person
is told, and nothing is moved.
"""


def announced(sign: Sign) -> str:
    """Why what a health service found announces that its place fails, for people; "" if it does
    not. Raises PlaybookError.
    """
    if isinstance(sign, HealthReport):
        return failing(sign.what, sign.code)
    return ALARMS.get(sign.what, "")


def failing(what: str, code: int) -> str:
    """Why a device that reported this is about to fail, for people; "" if it is not. ``what``,
    ``code``: as in a report of the health source. An XID announces a failure if the playbook has
    work leave the device at once (``move``). Raises PlaybookError.
    """
    entry = entry_of(what, code)
    if entry is None or not entry.move:
        return ""
    return f"{f'XID {code}' if what == 'xid' else what}: {entry.meaning.rstrip('.')}"


def entry_of(what: str, code: object) -> Entry | None:
    """The playbook's entry of a report. What a driver reports as ``ecc`` is a double-bit error, and
    means what XID 48 does; its ``code`` does not count. Raises PlaybookError.
    """
    number = {"xid": code, "ecc": 48}.get(what)
    return playbook().by_xid(number) if type(number) is int else None
