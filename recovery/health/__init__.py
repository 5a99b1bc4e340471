"""Health of a job: what is measured of its devices, hosts and ranks, and what looks wrong in it."""
