"""What several commands share: options, output, the group of all, the process they run as."""
