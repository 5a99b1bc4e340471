"""What checkers get to see, and the answers they can give."""
