"""A training program that is not ours and uses nothing of ours: one process a rank by RANK,
standard library only.

``python fake_trainer.py launch --ranks 2 ...`` starts its ranks, and starts all of them again when
one fails (as torchrun does); without ``launch`` it is one rank. Ranks keep in step through files in
``--scratch``; rank 0 keeps a checkpoint there. What it can be told to do wrong is in the options.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

# By most tests; from outside that is noticed some time later, which must not be after the end.
FAULTED_AT = 12
LAG = 4  # lines
pause = threading.Event().wait  # it takes its time; the tests themselves never sleep


def rank_main(args: argparse.Namespace) -> int:
    """One rank: from the checkpoint on, each step once all ranks have done the one before."""
    rank = int(os.environ.get("PLACE") or os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    scratch, attempt = Path(args.scratch), os.environ.get("ATTEMPT", "0")
    saved = scratch / "saved" / "checkpoint.json"
    saved.parent.mkdir(exist_ok=True)
    state = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "weight": 1.0}
    told: list[int] = []
    if args.polite or args.answers is not None:
        signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    wrong = attempt != "0" or not args.again
    if args.shared and rank == 0 and wrong:
        # nobody will remove it
        os.open(f"/dev/shm/fake_trainer_{os.getpid()}", os.O_CREAT | os.O_WRONLY)
    first = attempt == "0" and state["step"] == 0
    slow = args.late_s is not None and first and os.environ.get("CHAOS_ARM") != "control"
    begun = state["step"] + args.skip * (not first)
    printed = Printed(args.prints, rank)
    pause(args.first_late_s)
    for step in range(begun + 1, args.steps + 1):
        after = not first or any(scratch.glob("gone.*"))
        pause(args.late_s if slow and step > FAULTED_AT and not after else args.step_s)
        pause(0.0 if first else args.slower_s)
        if step == args.hang_at and wrong:
            pause(600)
        if args.points:
            compute(state, step, args.retry)
        (scratch / f"{attempt}.{rank}").write_text(str(step))
        if not wait_for_all(scratch, attempt, world, step, args.timeout_s):
            print(f"rank {rank}: a peer did not come to step {step}", flush=True)
            return 1
        if args.beacon:
            from trainchaos import beacon

            beacon.step(step, loss=state.get("weight", 1.0) / step, samples=4)
        elif step % args.log_every == 0:
            learned = {"weights": step - begun, "all": 1}.get(args.loses, step) if after else step
            loss = f"{1.0 / learned:.6f}" if args.loss is None or not wrong else args.loss
            printed.say(step, loss)
        if rank == 0 and step % args.save_every == 0:
            save(saved, {**state, "step": step}, args.points)
        if told:
            save(saved, {**state, "step": step}, args.points)
            pause(args.answers_late_s)
            return args.answers or 0
        if step == args.ends_at and wrong:
            break
    printed.rest()
    return 0


class Printed:
    """The lines of a rank, in the way that it prints them."""

    def __init__(self, how: str | None, rank: int) -> None:
        self._how, self._rank = how, rank
        self._held: list[str] = []

    def say(self, step: int, loss: str) -> None:
        """A step is done."""
        how = self._how
        if self._rank and how not in ("all", "lag", "eval"):
            return
        self._held.append(f"[default{self._rank}]:step {step} loss {loss}")
        if how == "swapped":
            if len(self._held) == 2:
                self._held.reverse()
                self.rest()
            return
        if how == "torn":  # as of two ranks that print at once
            line = self._held.pop()
            print(line, line.replace("0]", "1]", 1), "\n\n", sep="", end="", flush=True)
        while len(self._held) > LAG * self._rank * (how == "lag"):
            print(*[self._held.pop(0)] * (1 + (how == "twice")), sep="\n", flush=True)
        if how == "eval" and step % 5 == 0:
            for part in range(1, 4):
                print(f"[default{self._rank}]:eval step {part} loss 9.5", flush=True)

    def rest(self) -> None:
        """What it still owes."""
        if self._held:
            print(*self._held, sep="\n", flush=True)
        self._held.clear()


def compute(state: dict[str, float], step: int, retry: bool) -> None:
    """The parts of a step, with a gradient of one number; ``retry``: what raises is done again."""
    from trainchaos import beacon

    try:
        for name in ("forward", "backward"):
            beacon.point(name, step)
    except RuntimeError:
        if not retry:
            raise
    gradient = 0.0
    if beacon.point("gradient", step) == "nan":
        before, gradient = gradient, float("nan")
        beacon.did("nan", step, before=before, after=gradient)
    beacon.point("optimizer", step)
    state["weight"] += gradient


def save(path: Path, state: dict[str, float], points: bool) -> None:
    """Write beside it, then rename; in between is its point."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as stream:
        text = json.dumps(state)
        stream.write(text[: len(text) // 2])
        stream.flush()
        if points:
            from trainchaos import beacon

            beacon.point("saving", int(state["step"]))
        stream.write(text[len(text) // 2 :])
    temporary.replace(path)


def wait_for_all(scratch: Path, attempt: str, world: int, step: int, timeout_s: float) -> bool:
    """A barrier made of files."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        gone = {int(path.suffix[1:]) for path in scratch.glob("gone.*")}
        done = [scratch / f"{attempt}.{rank}" for rank in range(world) if rank not in gone]
        if all(path.exists() and int(path.read_text() or 0) >= step for path in done):
            return True
        pause(0.002)
    return False


def launch(args: argparse.Namespace, argv: list[str]) -> int:
    """Start all ranks; when one fails kill the others and, while restarts are left, begin again."""
    if args.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for attempt in range(args.restarts + 1):
        if args.daemon and attempt == args.again:
            subprocess.Popen(["sleep", "300"], start_new_session=True)
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *argv],
                env={
                    **os.environ,
                    "PLACE": str(rank),
                    **({"RANK": str(rank)} if rank < (args.named or args.ranks) else {}),
                    "WORLD_SIZE": str(args.ranks),
                    "ATTEMPT": str(attempt),
                },
            )
            for rank in range(args.ranks)
        ]
        while True:
            codes = [one.poll() for one in ranks]
            lost = [rank for rank, code in enumerate(codes) if code]
            if lost and not args.survives:
                break
            for rank in lost:
                (Path(args.scratch) / f"gone.{rank}").touch()
            if None not in codes:
                if args.stubborn:
                    pause(600)
                return 0
            pause(0.01)
        for one in ranks:
            one.kill()
            one.wait()
        if args.ghost:
            for step in range(FAULTED_AT, args.steps + 1):
                pause(args.step_s)
                print(f"[default0]:step {step} loss 0.083333", flush=True)
            return 0
    return 1


def options() -> argparse.Namespace:
    """What it is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("launch", nargs="?")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-s", type=float, default=0.03)
    parser.add_argument(
        "--late-s", type=float, default=None, help="a step's beyond the twelfth, until begun again"
    )
    parser.add_argument("--timeout-s", type=float, default=120.0)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--log-every", type=int, default=1)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--scratch", default=os.environ.get("CHAOS_SCRATCH", "."))
    parser.add_argument("--beacon", action="store_true")
    parser.add_argument(
        "--points", action="store_true", help="let a run act in the middle of a step"
    )
    parser.add_argument("--retry", action="store_true", help="catch what a point raises, and go on")
    parser.add_argument(
        "--daemon", action="store_true", help="leave a process of another session behind"
    )
    parser.add_argument(
        "--polite", action="store_true", help="when asked to end save, and end with exit code 0"
    )
    wrong(parser)
    return parser.parse_args()


def wrong(parser: argparse.ArgumentParser) -> None:
    """What it is told to do wrong."""
    parser.add_argument(
        "--again",
        action="store_true",
        help="hang, end, leave something behind or print another loss only when begun again",
    )
    parser.add_argument(
        "--loses",
        choices=("weights", "all"),
        help="begun again, go on with the step and other weights, or learn nothing",
    )
    parser.add_argument("--hang-at", type=int, help="a step that never ends")
    parser.add_argument("--skip", type=int, default=0, help="steps left out when begun again")
    parser.add_argument("--answers", type=int, help="the same with another exit code")
    parser.add_argument("--answers-late-s", type=float, default=0.0)
    parser.add_argument("--shared", action="store_true", help="leave shared memory behind")
    parser.add_argument(
        "--stubborn", action="store_true", help="do not end, not even when asked to"
    )
    parser.add_argument("--ends-at", type=int, help="end after a step, with exit code 0")
    parser.add_argument("--loss", help="printed in the place of a loss")
    parser.add_argument("--prints", choices=("all", "lag", "eval", "torn", "twice", "swapped"))
    parser.add_argument("--named", type=int, help="ranks that have their number in RANK")
    parser.add_argument("--survives", action="store_true", help="without those that are lost")
    parser.add_argument("--slower-s", type=float, default=0.0, help="each step, begun again")
    parser.add_argument("--first-late-s", type=float, default=0.0)
    parser.add_argument(
        "--ghost", action="store_true", help="the launcher prints what is left, and trains nothing"
    )


def main() -> int:
    """See the module."""
    args = options()
    if args.launch:
        return launch(args, [word for word in sys.argv[1:] if word != "launch"])
    return rank_main(args)


if __name__ == "__main__":
    sys.exit(main())
