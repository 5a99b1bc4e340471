"""How node-isolate is tried."""

from tests.support.fault_fakes import CUT

CASE = CUT
