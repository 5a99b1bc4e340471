"""The processes of a command: started, found, named, signalled, and observed to exit."""
