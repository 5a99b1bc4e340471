"""The one record: what can be said in it, how it is written, read, and brought to one clock."""
