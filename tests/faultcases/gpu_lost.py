"""How gpu-lost is tried."""

from dataclasses import replace

from tests.support.fault_fakes import KILLED

CASE = replace(KILLED, restores=False)
