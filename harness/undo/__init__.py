"""Undo records: every change to the machine is recorded, with how to undo it, before it is made."""
