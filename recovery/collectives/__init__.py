"""What carries a decision out inside a rank; torch lives here."""
