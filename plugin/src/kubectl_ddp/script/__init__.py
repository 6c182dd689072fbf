"""Make a DDPJob of a script: its manifest, the files that travel with it, and how it is written.

commands/run.py applies it. What comes from this machine is checked here, by the API server's rules.
"""
