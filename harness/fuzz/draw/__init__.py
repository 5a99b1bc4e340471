"""Random scenarios: drawn, made smaller, and written down."""
