"""When faults fire and whom they hit: decided before the first one, from scenario and seed
alone.
"""
