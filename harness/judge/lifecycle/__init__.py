"""The life of each process and checkpoint, line by line: which event requires which other."""
