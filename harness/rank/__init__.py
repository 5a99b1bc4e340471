"""Code in a rank's process besides the recovery stack: the training loop and the fault agent."""
