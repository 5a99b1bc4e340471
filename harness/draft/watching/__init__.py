"""What is seen of a command while it is watched: lines, processes and files."""
