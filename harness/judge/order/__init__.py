"""What must have come before what: happens-before, anchors in time, clocks that run wrong."""
