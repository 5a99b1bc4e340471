"""The processes of a command: started, found, named, signalled, and seen to end."""
