"""The search for what the judge does not see: logs of runs that pass, changed."""
