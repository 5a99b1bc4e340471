"""One module for each fault kind: how the contract test tries it."""
