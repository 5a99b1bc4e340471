"""The injector: decides when each planned fault acts, from arming to heal. ``sites``: targets."""
