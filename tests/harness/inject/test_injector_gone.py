"""What was due while there was nothing to act on: it acts later, or says at the end why it never
did.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.inject.test_injector import SECOND, Rig
from trainchaos.harness.inject.occurrences import NOT_THERE


@pytest.mark.parametrize(("at", "step"), [({"step": 15}, 15), ({"time": 3.0}, None)])
@pytest.mark.parametrize("there", ["never", "later", "not yet due"])
def test_what_was_due_and_never_there_is_said_at_the_end(
    at: dict[str, Any], step: int | None, there: str, tmp_path: Path
) -> None:
    rig = Rig(tmp_path, "spare-kill", at, target={})
    spare, rig.scene.spare = rig.scene.spare, lambda index: None
    rig.train()
    if there != "not yet due":
        rig.scene.now += 4 * SECOND
        rig.injector.tick(20)
    if there == "later":
        rig.scene.spare = spare
        rig.injector.tick(21)
    rig.injector.close()
    assert len(rig.scene.told("fault_injected")) == (there == "later")
    said = [
        (d["reason"], d["step"])
        for d in rig.scene.told("fault_failed")
        if "not fired" in d["reason"]
    ]
    assert said == ([(f"not fired: {NOT_THERE}", step)] if there == "never" else [])
