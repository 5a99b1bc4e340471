"""What supervisor and ranks share: messages, progress counters, event ring, authentication."""
