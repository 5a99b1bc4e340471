"""Shared by supervisor and ranks: messages, progress counters, event ring, authentication."""
