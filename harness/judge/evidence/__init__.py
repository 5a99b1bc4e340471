"""What a checker gets as evidence, and the answers that it can give."""
