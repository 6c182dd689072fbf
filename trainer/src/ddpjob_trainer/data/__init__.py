"""Decide which samples a step trains on (order, user_samplers), and bring them to a rank.

run.steps() calls inputs.open_input(): a map-style dataset goes through fetch, in this process or in
workers; what can only be read forwards through stream. Generators are seeded on the way.
"""
