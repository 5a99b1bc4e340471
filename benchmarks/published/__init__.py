"""Recovery times that pages state, and the register of measurements that they come from."""
