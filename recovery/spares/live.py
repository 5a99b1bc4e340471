"""What a process of a job with live spares holds for them: as a rank its ``feeds``, as a spare its
``follower``.
"""

from __future__ import annotations

from collections.abc import Callable

from trainchaos.recovery.policy.jobconfig import LOOPBACK, JobConfig
from trainchaos.recovery.spares.feeds import Feeds
from trainchaos.recovery.spares.follower import Follower
from trainchaos.recovery.state.state import TrainState


class Live:
    """For ``sync: live``. ``write``: logs an event of this process; ``changed``: called before a
    spare's state becomes another than the initial one; ``brings``: as a spare this process had
    followed to the state with which it joined the generation. Used by the training thread.
    """

    def __init__(
        self,
        config: JobConfig,
        state: TrainState,
        write: Callable[..., None],
        changed: Callable[[], None],
    ) -> None:
        self.feeds = Feeds(lag=config.sync_lag, write=write)
        host = config.net.address or LOOPBACK
        self.follower: Follower | None = Follower(state, host=host, write=write, changed=changed)
        self._waits = self.brings = False

    @property
    def address(self) -> str:
        """Where this process is fed ("": nowhere); on any thread."""
        follower = self.follower
        return follower.address if self._waits and follower is not None else ""

    def waits(self) -> None:
        """This process holds what it is to follow, and may be fed from now on. Once is enough."""
        if self.follower is not None and not self._waits:
            self._waits = True
            self.follower.start()

    def settled(self, check: Callable[[], None]) -> int:
        """The step whose whole state this spare holds once nothing more arrives (-1: none);
        ``check`` as in ``Follower.settle``.
        """
        if self.follower is None:
            return -1
        self.follower.drain(None, check)
        return self.follower.step

    def joins(self, *, settles: bool, receives: bool) -> None:
        """This process joins a generation; ``settles``: it may hold the generation's state, so that
        it follows until then; ``receives``: it is given the state. Raises RuntimeError where it
        cannot stop following.
        """
        self.feeds.leaves()
        follower = self.follower
        if not settles:
            self.feeds.forget()
            self.promoted()
        self.brings = follower is not None and not receives and follower.step >= 0

    def promoted(self) -> None:
        """This process follows no more."""
        follower, self.follower = self.follower, None
        if follower is not None:
            follower.close()

    def close(self) -> None:
        """The job is over for this process."""
        self.feeds.close()
        self.promoted()
