"""What a fault is: its base class, what it may touch, and what must be seen of it afterwards. The
kinds: ``chaos.faults``.
"""
