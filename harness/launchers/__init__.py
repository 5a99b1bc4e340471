"""Ways to run ranks, one file each."""

from trainchaos.chaos.plugins import with_outside

__path__ = with_outside(__path__, "launchers")
