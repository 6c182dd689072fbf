"""Make a DDPJob of a script: its manifest, the files that travel with it, and how it is written.

commands/launch.py applies it. What comes from here is checked by the API server's rules, earlier.
"""
