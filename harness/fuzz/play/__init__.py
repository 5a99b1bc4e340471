"""One scenario of a search: played, watched, and taken for a defect or not."""
