"""Arms whose ranks are on several machines, or on containers that stand for them."""
