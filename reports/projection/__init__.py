"""The page and files of a projection."""
