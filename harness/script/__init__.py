"""A training script under test: run unchanged, and watched and hit from outside."""
