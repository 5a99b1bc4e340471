"""What is done about places that are suspect or about to fail: they are checked before a process
rejoins, and tainted for later jobs.
"""
