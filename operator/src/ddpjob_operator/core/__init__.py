"""Decide without side effects: state in, actions out. Start reading at plan.py."""
