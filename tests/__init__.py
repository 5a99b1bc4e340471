"""The tests, in folders as the rooms that they try."""
