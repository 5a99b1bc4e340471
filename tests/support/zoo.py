"""Models and objects whose state changes otherwise than by the optimizer's step, as real training
has them; each takes part in the loss of one model.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from trainchaos.recovery.state.registered import Attributes

WIDTH = 8


class Member(nn.Module):
    """Computes a loss. ``own``: its weights depend on what each rank has of its own, so that a
    process that takes a lost rank's place does not go on as that one would have; ``passes``: they
    depend on how many passes a rank makes; ``saved``: all that it is goes into a checkpoint.
    """

    own: ClassVar[bool] = False
    passes: ClassVar[bool] = False
    saved: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, 1)

    def between(self, hidden: Tensor) -> Tensor:
        """What it is about."""
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        """The sum over the samples."""
        return self.outer(torch.tanh(self.between(self.inner(x)))).square().sum()

    def registered(self) -> dict[str, tuple[Any, Callable[..., Any] | None]]:
        """What is given to ``job.register``: object and ``update``."""
        return {}


class Plain(Member):
    pass


class Drops(Member):
    def between(self, hidden: Tensor) -> Tensor:
        return functional.dropout(hidden, 0.3, self.training) + torch.randn_like(hidden) / 100


class BatchNorm(Member):
    def __init__(self) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH)

    def between(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)  # type: ignore[no-any-return]


class CumulativeNorm(BatchNorm):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)


class InstanceNorm(BatchNorm):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(
            nn.Unflatten(1, (2, WIDTH // 2)),
            nn.InstanceNorm1d(2, track_running_stats=True, affine=True),
            nn.Flatten(),
        )


class SpectralNorm(BatchNorm):
    passes = True

    def __init__(self) -> None:
        super().__init__()
        self.norm = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


class WeightNorm(BatchNorm):
    def __init__(self) -> None:
        super().__init__()
        self.norm = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class RunningMean(Member):
    """Subtracts the mean of all that it has seen."""

    own = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def between(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.n += 1
            self.mean += ((hidden.mean(0) - self.mean) / self.n).float()
        return hidden - self.mean


class Reassigned(RunningMean):
    """The same with buffers that are other tensors in each step."""

    def between(self, hidden: Tensor) -> Tensor:
        self.n = self.n + 1
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return hidden - self.mean


class Lazily(Member):
    """Makes a buffer in its first pass, and caches a mask."""

    own = True
    saved = False

    def between(self, hidden: Tensor) -> Tensor:
        if not hasattr(self, "first"):
            self.register_buffer("first", hidden.detach().mean(0))
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(WIDTH), persistent=False)
        self.first *= 0.9
        return hidden * self.mask - self.first


class Transient(Member):
    """Counts in a buffer that is not saved, as torch does not save it."""

    own = True
    saved = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def between(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return hidden / self.calls


class Router(Member):
    """Balances its experts by the tokens that each got, without a loss for it."""

    own = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens", torch.zeros(WIDTH, dtype=torch.int64))
        self.register_buffer("bias", torch.zeros(WIDTH))

    def between(self, hidden: Tensor) -> Tensor:
        top = (hidden + self.bias).argmax(1)
        self.tokens += torch.bincount(top, minlength=WIDTH)
        mean = self.tokens.double().mean()
        self.bias += 0.001 * (mean - self.tokens).sign().float()
        return hidden * functional.one_hot(top, WIDTH)


class Codebook(Member):
    """Vector quantisation whose codes are moving averages."""

    own = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))

    def between(self, hidden: Tensor) -> Tensor:
        nearest = torch.cdist(hidden.detach(), self.codes).argmin(1)
        for code in range(4):
            if (nearest == code).any():
                self.codes[code].lerp_(hidden.detach()[nearest == code].mean(0), 0.1)
        chosen = self.codes[nearest]
        return hidden + (chosen - hidden).detach() + 0.1 * (hidden - chosen)


class CodebookByData(Codebook):
    """As many write it: torch counts no change of the tensor."""

    def between(self, hidden: Tensor) -> Tensor:
        self.codes.data.lerp_(hidden.detach().mean(0).expand(4, WIDTH), 0.05)
        return hidden - self.codes[0]


class AmaxHistory(Member):
    """The scale of a smaller type follows from the largest values of the last steps."""

    own = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(4, dtype=torch.bfloat16))

    def between(self, hidden: Tensor) -> Tensor:
        self.history.copy_(self.history.roll(1))
        self.history[0] = hidden.detach().abs().max()
        scale = self.history.float().max() / 8 + 1e-3
        return hidden + ((hidden / scale).round() * scale - hidden).detach()


class Observer(Member):
    own = True

    def __init__(self) -> None:
        super().__init__()
        self.quantise = FakeQuantize.with_args(
            observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255
        )()

    def between(self, hidden: Tensor) -> Tensor:
        return self.quantise(hidden)  # type: ignore[no-any-return]


class Momentum(Member):
    """A second encoder follows the first, with a queue of what it has seen."""

    own = True

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(6, WIDTH))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))

    def follow(self) -> None:
        for key, query in zip(self.key.parameters(), self.inner.parameters(), strict=True):
            key.mul_(0.9).add_(query, alpha=0.1)

    def between(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.follow()
            self.queue[self.at % 6] = self.key(hidden).mean(0)
            self.at += 1
        return hidden - self.queue.mean(0)


class MomentumByData(Momentum):
    def follow(self) -> None:
        for key, query in zip(self.key.parameters(), self.inner.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1


class Clamped(Member):
    """The weights are clipped before each pass."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.2, 0.2)
        return super().forward(x)


class Tied(Member):
    def between(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.inner.weight)


class Hooked(Member):
    """A hook keeps statistics in a buffer of another module."""

    own = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.inner.register_forward_hook(self.see)

    def see(self, _: nn.Module, __: Any, hidden: Tensor) -> None:
        self.seen += hidden.detach().mean(0)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden - self.seen / 100


class Checkpointed(Member):
    """Activations are computed again in the backward pass, with the same random numbers."""

    def between(self, hidden: Tensor) -> Tensor:
        return checkpoint(lambda h: functional.dropout(h, 0.5), hidden, use_reentrant=False)  # type: ignore[no-any-return]


class Frozen(Member):
    """A frozen base with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def between(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + hidden


class Odd(Member):
    """Buffers of every kind."""

    own = True
    saved = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("turned", torch.zeros(4, 2).t())
        self.register_buffer("wave", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("limits", torch.tensor([-torch.inf, torch.inf]))

    def between(self, hidden: Tensor) -> Tensor:
        self.flags.logical_not_()
        self.turned += 1
        self.wave *= 1j
        self.none = hidden.detach().mean(0)
        self.empty = torch.cat([self.empty, self.none[:1]])
        return hidden * self.flags[0] - self.turned[0, 0] / 100 + self.wave.real.sum()


class Averaged(Member):
    """A moving average of its weights, after each step."""

    def registered(self) -> dict[str, tuple[Any, Callable[..., Any] | None]]:
        average = AveragedModel(self.inner)
        return {"average": (average, lambda: average.update_parameters(self.inner))}


class Stateful:
    """Plain values."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Replays(Member):
    """Trains on what it has seen before, too."""

    own = True

    def __init__(self) -> None:
        super().__init__()
        self.kept = Stateful(seen=deque(maxlen=3), by={0: 0}, shape=(1, 2), best=float("inf"))

    def between(self, hidden: Tensor) -> Tensor:
        state = self.kept.state
        before = sum(mean for mean, _ in state["seen"])
        state["seen"].append((float(hidden.detach().mean()), state["by"][0]))
        state["by"][0] += 1
        state["best"] = min(state["best"], before)
        return hidden + before

    def registered(self) -> dict[str, tuple[Any, Callable[..., Any] | None]]:
        return {"replayed": (self.kept, None)}


class Curriculum(Member):
    """Goes by a counter of its own, and one in an attribute."""

    own = True

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.level = Stateful(n=0, total=torch.zeros(2))

    def between(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        state = self.level.state
        state["n"] += len(hidden)
        state["total"] = state["total"] + 1
        return hidden * (1 + state["n"] % 7) / (1 + self.calls)

    def registered(self) -> dict[str, tuple[Any, Callable[..., Any] | None]]:
        return {"level": (self.level, None), "calls": (Attributes(self, "calls"), None)}


class Noisy(Member):
    """Draws from generators of its own."""

    own = True

    def __init__(self) -> None:
        super().__init__()
        self.sources = torch.Generator(), numpy.random.default_rng(1), random.Random(1)

    def between(self, hidden: Tensor) -> Tensor:
        one, two, three = self.sources
        noise = torch.rand(WIDTH, generator=one) + two.random() + three.random()
        return hidden * noise

    def registered(self) -> dict[str, tuple[Any, Callable[..., Any] | None]]:
        return {f"noise{n}": (source, None) for n, source in enumerate(self.sources)}


class Big(Member):
    """A large buffer that never changes, one that changes from its third pass on, and one that
    always does.
    """

    own = True

    def __init__(self) -> None:
        super().__init__()
        for name in ("constant", "late", "always"):
            self.register_buffer(name, torch.ones(1 << 15))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def between(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        self.always += 1
        if self.calls > 2:
            self.late *= 0.99
        return hidden * self.late[0] + self.always[-1] / 1000 + self.constant[0]


MEMBERS: dict[str, type[Member]] = {
    kind.__name__: kind
    for kind in (
        Plain,
        Drops,
        BatchNorm,
        CumulativeNorm,
        InstanceNorm,
        SpectralNorm,
        WeightNorm,
        RunningMean,
        Reassigned,
        Lazily,
        Transient,
        Router,
        Codebook,
        CodebookByData,
        AmaxHistory,
        Observer,
        Momentum,
        MomentumByData,
        Clamped,
        Tied,
        Hooked,
        Checkpointed,
        Frozen,
        Odd,
        Averaged,
        Replays,
        Curriculum,
        Noisy,
        Big,
    )
}


class Zoo(nn.Module):
    """Some of them, each trained by itself."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.members = nn.ModuleDict({name: MEMBERS[name]() for name in names})

    def forward(self, x: Tensor) -> Tensor:
        """The sum of their losses."""
        return torch.stack([member(x) for member in self.members.values()]).sum()

    def registered(self) -> dict[str, tuple[Any, Callable[..., Any] | None]]:
        """What all of them register."""
        return {
            f"{name}_{key}": found
            for name, member in self.members.items()
            for key, found in member.registered().items()
        }
