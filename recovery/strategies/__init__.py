"""Recovery policies, one file each: pure functions from a cluster view to a decision."""
