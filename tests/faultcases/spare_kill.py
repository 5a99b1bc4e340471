"""How spare-kill is tried."""

from tests.support.fault_fakes import KILLED

CASE = KILLED
