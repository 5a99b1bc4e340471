"""How partition is tried."""

from tests.support.fault_fakes import CUT

CASE = CUT
