"""What a comparison will play, in which order, and where it is kept."""
