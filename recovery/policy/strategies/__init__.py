"""Recovery policies, one file each: pure functions from a cluster view to a decision."""

from __future__ import annotations

from trainchaos.chaos import plugins
from trainchaos.recovery.policy.strategy import Strategy

__path__ = plugins.with_outside(__path__, "strategies")


def names() -> list[str]:
    """Every strategy's name: its module's, with dashes; or that of an entry point."""
    return list(plugins.load(plugins.STRATEGIES, Strategy))


def find(name: str) -> type[Strategy]:
    """The strategy of that name. Raises KeyError when there is none."""
    return plugins.load(plugins.STRATEGIES, Strategy)[name]


def name_of(strategy: Strategy) -> str:
    """The name of a strategy's class."""
    return plugins.name_of(plugins.STRATEGIES, type(strategy))
