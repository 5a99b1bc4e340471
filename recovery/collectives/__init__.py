"""Process groups, gradient reduction and state transfer inside a rank; torch is imported here."""
