"""An event log put in order: generations, process lives, checkpoints and episodes."""
