"""Reckon how much of a gang's time is useful: Parts -> story, simulation, formulas -> tables.

commands/plan.py fills Parts from options. Nothing here asks a cluster, a clock or the environment.
"""
