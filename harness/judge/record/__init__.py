"""An event log put in order: generations, lives of processes, checkpoints, episodes."""
