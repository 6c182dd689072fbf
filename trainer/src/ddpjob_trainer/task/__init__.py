"""The task runner: training described by a few functions in a file, without a loop of one's own.

command.py reads the command line and never imports torch; runner.py is a loop on the public API.
"""
