"""Which samples a step trains on (sampler, permutation), and how a rank gets them.

inputs.py reads what run.steps() was given: a map-style dataset goes through fetch.py, in this
process or in workers.py; what can only be read forwards through stream.py.
"""
