"""Drafts a scenario for a user's command from a short watch of it, and tightens the limits of one
that has run.
"""
