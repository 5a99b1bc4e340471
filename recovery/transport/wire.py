"""Messages between supervisor and ranks (``recovery.transport.stream``)."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import field

from trainchaos.recovery.policy.doubts import Doubt
from trainchaos.recovery.policy.interval import Rewinds
from trainchaos.recovery.transport.stream import Message, Record, parser

MOST_LEFT_OUT = 4096  # samples in a message
# samples that a rank may name: whatever their numbers, they fit into one message
MOST_BLAMED = 32_768


class StateSource(Record, omit_defaults=True):
    """Where a member of a generation gets the state. ``restore``: the first replica loads the
    newest good checkpoint before; ``source``: the rank that sends its part of the state to all of
    its holders that need it (-1: none of them does), ``receives``: this one is among them;
    ``direct``: it goes from rank to rank, and who neither receives nor ``feeds`` others takes no
    part (``recovery.policy.rank_assignment``); ``live``: the step that ``source`` holds, where a
    new member may have followed the job up to there, so that ranks compare what they hold before
    anything is copied (-1: no); ``finish``: a step whose gradients some ranks have reduced and not
    applied: whoever has applied it tells them the rest (0: none).
    """

    restore: bool = False
    source: int = -1
    receives: bool = False
    direct: bool = False
    feeds: list[int] = field(default_factory=list)
    live: int = -1
    finish: int = 0


class Resume(Record, omit_defaults=True):
    """How training goes on. ``left_out``: so many samples are, by ``LeaveOut``; ``examine``: the
    step at which a non-finite value is to be traced to samples (0: none); ``doubts``: which
    checkpoints may hold a corrupted state and are to be set aside, answered by ``SetAside``;
    ``agreed``, ``anew``: see ``recovery.supervise.divergence.CheckpointAdvice``; ``rewinds``: by
    which checkpoints are spaced (None: the rank goes by what it sees itself).
    """

    left_out: int = 0
    examine: int = 0
    doubts: list[Doubt] = field(default_factory=list)
    agreed: int = -1
    anew: bool = True
    rewinds: Rewinds | None = None


class Join(Message):
    """To a rank: become ``rank`` of ``world`` in ``generation``. As long for any number of ranks:
    each is told what it needs itself, and finds the others through the store. ``shards``: see
    ``recovery.policy.layout``; ``standby``: the group is formed already, under this name ("": it is
    not).
    """

    generation: int
    rank: int
    world: int
    store_port: int
    timeout_s: float
    shards: int = 1
    standby: str = ""
    state: StateSource = StateSource()
    resume: Resume = Resume()


class StandBy(Message):
    """To a rank or a spare: beside what you do, form the group that follows ``generation`` if
    ``lost``, a rank of it, is lost, and be ``rank`` of ``world`` there. ``group``: its name; an
    earlier one for the same loss is void. Answered by ``StoodBy``, or not at all.
    """

    generation: int
    lost: int
    group: str
    rank: int
    world: int
    store_port: int


class LeaveOut(Message):
    """To a rank: leave these samples out, each from a step on, besides the ``after`` samples sent
    before (0: forget those, as this supervisor does not know them). Each is sent once,
    MOST_LEFT_OUT at a time.
    """

    after: int
    samples: list[int]
    since: list[int]


class Abort(Message):
    """To a rank: leave ``generation`` now, whatever it is doing, and park."""

    generation: int


class Feed(Message):
    """To a rank: keep the process ``spare`` up to date, which listens at ``address`` (see
    ``recovery.spares.frames``). ``anew``: send it the whole state first, whatever it holds.
    """

    spare: str
    address: str
    anew: bool = False


class Follow(Message):
    """To a spare that holds no part of the model yet: hold part ``shard`` from now on, as its ranks
    do, and be fed. Answered by ``Following``, each time that it is sent.
    """

    shard: int


class Following(Message):
    """From a spare: it holds part ``shard``, and listens at ``live`` for a rank that keeps it up to
    date.
    """

    shard: int
    live: str


class Settle(Message):
    """To a spare that follows the job: no rank holds a whole state, so say what you hold once
    nothing more arrives. Answered by ``Settled``.
    """


class Settled(Message):
    """From a spare: the step whose whole state it holds (-1: none)."""

    step: int


class PauseRequest(Message):
    """To one rank: have the whole generation park after its next commit; ``save``: and save a
    checkpoint before.
    """

    save: bool = False


class Agreed(Message):
    """To the rank that saves: at ``step`` the replicas were the same, so that its checkpoint, or
    the newest before it, is to be kept until they agree on a newer one.
    """

    step: int


class Stop(Message):
    """To a rank: end well."""


class Inquiry(Message):
    """To a rank: report your status; sent by a supervisor that takes over. ``number``: for the
    answer, since one to another supervisor, which was lost in its turn, may come first.
    """

    number: int = 0


class Status(Message):
    """From a rank: the answer. ``waiting``: in no generation (``generation``: the one it left, 0:
    never in one), nor told to join one; ``pending``: as in Parked; ``live``: where it listens for a
    rank that keeps it up to date ("": nowhere); ``shard``: the part of the model that it was told
    to follow (-1: none).
    """

    place: Literal["waiting", "joining", "training", "finished"]
    generation: int
    step: int
    valid: bool
    pending: int = 0
    number: int = 0
    live: str = ""
    shard: int = -1


class Recall(Message):
    """To a rank that is suspected to hang: say in which collective you stand. ``number``: for the
    answer. Nobody waits for it.
    """

    number: int


class CollectiveEntry(Record):
    """One collective as torch's flight recorder has it: ``seq``: its number in its group, alike on
    all ranks; ``sizes``: of what goes in.
    """

    group: str
    seq: int
    op: str
    sizes: str
    state: Literal["done", "started", "scheduled"]


class Recalled(Message):
    """From a rank: the answer, see ``recovery.detection.flight_recorder``. ``why``: there are no
    entries; ``begun``: operations of its group that it has begun and that are not done, those with
    one other rank too; None: it has no group.
    """

    number: int
    rank: int
    entries: list[CollectiveEntry]
    why: str = ""
    begun: int | None = None


class Extra(Message):
    """Either way: something the recovery stack passes on unread (fault commands and their
    answers).
    """

    topic: str
    payload: dict[str, Any]


class Ready(Message):
    """From a rank: built and waiting for ``Join``. It says what it is about to train, the same on
    every rank, and with what software (see ``recovery.transport.versions``). ``live``: as in
    Status; where several ranks hold the model together, a spare listens from ``Follow`` on.
    """

    steps: int = 0
    samples: int = 0
    global_batch: int = 0
    seed: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    live: str = ""


class Parked(Message):
    """From a rank: left ``generation`` holding the state of ``step``. ``blamed``: ranks with bad
    values; ``samples``: its own that are to blame, MOST_BLAMED at most; ``pending``: the step whose
    reduced gradients it holds and has not applied (0: none).
    """

    generation: int
    step: int
    valid: bool
    why: Literal["aborted", "pause", "nonfinite", "failed"]
    blamed: list[int] = field(default_factory=list)
    error: str = ""
    samples: list[int] = field(default_factory=list)
    pending: int = 0


class Joined(Message):
    """From a rank: in ``generation``, group formed, state of ``step`` in place. ``digest``: of what
    it holds, the same on all that hold the same; empty where nobody else does.
    """

    generation: int
    step: int
    checkpoint: str | None
    digest: str = ""


class CheckpointNote(Message):
    """From a rank: a checkpoint is being saved, is committed, or could not be saved (``error``)."""

    state: Literal["saving", "committed", "failed"]
    checkpoint: str
    step: int
    error: str = ""


class SetAside(Message):
    """From the rank that saves: everything in ``doubts`` is set aside, on disk and in memory, so
    that ranks need not be warned of it any more.
    """

    doubts: list[Doubt]


class StoodBy(Message):
    """From a rank or a spare: it is connected to all others of this group."""

    generation: int
    group: str


class Digest(Message):
    """From a rank: a digest of its parameters and optimizer state after ``step`` (see
    ``recovery.supervise.divergence``)."""

    generation: int
    step: int
    digest: str


class Failed(Message):
    """From a rank: it is about to end because of this error."""

    error: str


class Unrecoverable(Message):
    """From a rank that is about to end because of ``error``: no other process in its place could do
    better.
    """

    error: str


class Notice(Message):
    """From a rank: it has notice that it will be ended soon (SIGTERM); it trains on until ordered
    otherwise.
    """


class Finished(Message):
    """From a rank: its last step is committed; it stays to help others until ordered to stop."""

    step: int


ToRank = (
    Join
    | StandBy
    | Feed
    | Follow
    | Settle
    | LeaveOut
    | Abort
    | PauseRequest
    | Agreed
    | Stop
    | Inquiry
    | Recall
    | Extra
)
FromRank = (
    Status
    | Ready
    | Parked
    | Joined
    | CheckpointNote
    | Digest
    | SetAside
    | Failed
    | Unrecoverable
    | Finished
    | Notice
    | Recalled
    | StoodBy
    | Following
    | Settled
    | Extra
)

ANY_MESSAGE = parser(ToRank | FromRank)
