"""Order in time: happens-before, anchors of injections, and clocks that run wrong."""
