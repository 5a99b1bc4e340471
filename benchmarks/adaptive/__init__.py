"""The sweep of the strategy ``adaptive``: what is played, and the tables made of it."""
