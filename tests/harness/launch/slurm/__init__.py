"""Tests of ``harness/launch/slurm``."""
