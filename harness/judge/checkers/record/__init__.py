"""Checkers of the record itself: complete, consistent, in a possible order, and of this arm."""
