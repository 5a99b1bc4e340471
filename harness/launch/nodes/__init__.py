"""Arms whose ranks run on several machines, or on containers that emulate them."""
