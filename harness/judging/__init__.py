"""What an event log means: its order, incidents, metrics and verdict. Pure, but for ``judge``, which reads them."""
