"""What a command says: its output, its beacon, and what they mean."""
