"""Commands about machines: what they can do, and what a run left on them."""
