"""The search for blind spots of the judge: logs of runs that pass, changed."""
