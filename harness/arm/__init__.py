"""What is common to the arms of a run, whatever trains in them: their processes, what an injector
may touch, who watches.
"""
