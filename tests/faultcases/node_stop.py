"""How node-stop is tried."""

from tests.support.fault_fakes import FaultCase, effect


def seen(*states: str) -> object:
    """What the platform says of its machines."""
    return effect(
        actor="orchestrator",
        nodes={str(node): {"state": state} for node, state in enumerate(states)},
    )


CASE = FaultCase(
    evidence=[effect(os_state="T", processes=["w1", "w2"])],
    elsewhere=[
        [effect(number=1, os_state="T")],
        [effect(fault="g", os_state="T")],
        [seen("paused", "running")],
    ],  # type: ignore[list-item]
    restores=True,
)
