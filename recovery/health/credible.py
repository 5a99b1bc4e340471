"""Which reports of a driver say that a device is about to fail, so that work is moved off it. Pure.

A report that is not credible costs nothing to ignore: if the device fails after all, that is a
failure like any other. One that is wrongly believed costs a move at a step boundary.
"""

from __future__ import annotations

FAILING_XIDS = {
    48: "an uncorrectable (double-bit) ECC error",
    63: "a row of memory is to be remapped",
    64: "a row of memory could not be remapped",
    74: "an NVLink error",
    79: "the device has fallen off the bus",
    92: "many single-bit ECC errors",
    95: "an uncontained ECC error",
}
"""XIDs after which NVIDIA's catalogue of XID errors has the device reset, drained or replaced,
though the process may not have ended. Not among them: 94, a contained error, whose process ends and
whose device goes on, and errors of the application (13, 31, 43, 45).
"""


def failing(what: str, code: int) -> str:
    """Why a device that reported this is about to fail, for people; "" if it is not. ``what``,
    ``code``: as in a report of the health source: the number of an XID, or of uncorrectable ECC
    errors.
    """
    if what == "xid" and code in FAILING_XIDS:
        return f"XID {code}: {FAILING_XIDS[code]}"
    if what == "ecc" and code > 0:
        return f"{code} uncorrectable ECC error{'s' if code > 1 else ''}"
    return ""
