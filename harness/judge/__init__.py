"""What an event log means: its order, incidents, metrics, findings and verdict."""
