"""Orders to ranks, with what a test does not care about filled in."""

from __future__ import annotations

from typing import Any

from trainchaos.recovery.transport.wire import Join, Resume, StateSource


def join(generation: int = 1, **more: Any) -> Join:
    """The order, with fields of its parts beside its own."""
    own = {"rank": 0, "world": 1, "store_port": 1, "timeout_s": 5.0, **more}
    parts = {
        name: kind(**{key: own.pop(key) for key in kind.__struct_fields__ if key in own})
        for name, kind in (("state", StateSource), ("resume", Resume))
    }
    return Join(generation=generation, **parts, **own)
