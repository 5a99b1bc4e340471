"""Fault kinds, one file each; the module name is the kind in a scenario."""

from trainchaos.chaos.plugins import with_outside

__path__ = with_outside(__path__, "faults")
