"""The life of each process and checkpoint, line by line: which line cannot be without which."""
