"""The exam of diagnosers: whether what is said of a job is what was done to it."""
