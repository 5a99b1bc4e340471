"""Tests of ``recovery/playbook``."""
