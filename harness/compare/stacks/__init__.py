"""Recovery stacks of a comparison, ours and others', one file each: how each trains the
common job.
"""

from trainchaos.chaos.plugins import with_outside

__path__ = with_outside(__path__, "stacks")
