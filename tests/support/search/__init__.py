"""What tests of the simulator and of the search share: defects to plant, random scenarios."""
