"""What a run would do, and what there is to name in a scenario, without doing any of it."""
