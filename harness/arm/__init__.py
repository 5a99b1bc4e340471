"""What all arms share, built-in workload or command: processes, what an injector may touch, and
watchers.
"""
