"""Checkers of the record itself: whole, consistent, in a possible order, and of the arm it says."""
