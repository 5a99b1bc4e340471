"""Undo records for a run's objects in a container engine: found by the run's label, removed by id,
never by name.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

from pydantic import Field

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.host.container_engine import NODE_LABEL, RUN_LABEL, asking, connect
from trainchaos.harness.undo.base import Undo, UndoOutcome, done, failed, nothing

REMOVE_LIMIT_S = 30.0
AGAIN_S = 0.05
AT_ONCE = 8


class _Labelled(Undo):
    """Base: all objects of one kind with the run's label. ``engine``: its URL."""

    outlives_boot: ClassVar[bool] = True  # an engine keeps its objects
    engine: str
    run: str = Field(min_length=8)

    def idle(self) -> bool:
        """Whether nothing is left; False if the engine does not answer."""
        try:
            with _engine(self.engine) as client:
                return not self._found(client)
        except InfrastructureError:
            return False

    def _undo(self) -> UndoOutcome:
        try:
            with _engine(self.engine) as client:
                return self._remove_all(client)
        except InfrastructureError as error:
            return failed(
                f"could not {self.intent()}: {error.message};"
                f" {error.hint or 'see the log of the engine'}"
            )

    def _remove_all(self, client: Any) -> UndoOutcome:
        """Remove until nothing is found: the engine may still be executing requests of a killed
        harness.
        """
        deadline = time.monotonic() + REMOVE_LIMIT_S
        removed: set[str] = set()
        problem = ""
        while found := self._found(client):
            if time.monotonic() > deadline:
                return failed(f"could not {self.intent()}: {problem or 'they stay'}")
            with ThreadPoolExecutor(AT_ONCE) as pool:
                problems = pool.map(lambda each: _refusal(lambda: self._remove(each)), found)
                problem = next((why for why in problems if why), "")
            removed |= {str(each.name) for each in found}
            time.sleep(AGAIN_S if problem else 0)
        return (
            done(f"removed {', '.join(sorted(removed))}")
            if removed
            else nothing(f"nothing to do: {self.intent()}")
        )

    @abstractmethod
    def _found(self, client: Any) -> Sequence[Any]:
        """The objects with the label. Raises InfrastructureError."""

    @abstractmethod
    def _remove(self, each: Any) -> None:
        """Remove one object."""


class RemoveContainers(_Labelled):
    """Kill and remove the containers of a run, and their anonymous volumes."""

    ends_processes: ClassVar[bool] = True
    do: Literal["remove-containers"] = "remove-containers"

    def intent(self) -> str:
        return f"remove the containers labelled {RUN_LABEL}={self.run}"

    def living(self) -> list[str]:
        """A line per existing container, by node, for people. Raises InfrastructureError."""
        with _engine(self.engine) as client:
            found = sorted(
                self._found(client), key=lambda each: int(each.labels.get(NODE_LABEL, -1))
            )
            return [f"{each.name} ({each.status})" for each in found]

    def _found(self, client: Any) -> Sequence[Any]:
        with asking("list the containers of the run"):
            rows = client.containers.list(
                all=True, filters={"label": f"{RUN_LABEL}={self.run}"}, ignore_removed=True
            )
            return list(rows)

    def _remove(self, each: Any) -> None:
        each.remove(force=True, v=True)


class RemoveNetworks(_Labelled):
    """Remove the networks of a run."""

    do: Literal["remove-networks"] = "remove-networks"

    def intent(self) -> str:
        return f"remove the networks labelled {RUN_LABEL}={self.run}"

    def _found(self, client: Any) -> Sequence[Any]:
        with asking("list the networks of the run"):
            return list(client.networks.list(filters={"label": f"{RUN_LABEL}={self.run}"}))

    def _remove(self, each: Any) -> None:
        each.remove()


@contextmanager
def _engine(url: str) -> Iterator[Any]:
    client = connect(url)
    try:
        yield client
    finally:
        client.close()


def _refusal(act: Callable[[], None]) -> str:
    """Why an object could not be removed; "" if it is gone."""
    from docker.errors import NotFound

    try:
        with asking("remove it"):
            try:
                act()
            except NotFound:
                pass
    except InfrastructureError as error:
        return error.message
    return ""
