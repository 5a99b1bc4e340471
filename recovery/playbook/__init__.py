"""What a sign of failure means and what to do about it: XIDs, signals, exit codes, error texts."""
