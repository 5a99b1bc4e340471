"""The injector: when each planned fault acts, from its arming to its heal. ``sites`` says where."""
