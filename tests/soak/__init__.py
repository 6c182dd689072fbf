"""A cluster under random faults for half an hour and more: see run.py."""
