"""Plays one scenario of a search, observes it, and decides whether it shows a defect."""
