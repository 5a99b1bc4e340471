"""When faults fire and what they hit, decided before the first one from scenario and seed alone."""
