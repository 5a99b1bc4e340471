"""Reports over stored runs, one file each; they read results and events only."""
