"""Ways for a fault to act inside a rank, one module each; the rank's fault agent composes them."""
