"""What a run does to the machine is written down before it is done, with how to undo it."""
