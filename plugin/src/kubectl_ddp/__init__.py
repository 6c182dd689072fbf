"""`kubectl ddp`: what a DDPJob does, told to the person who waits for it.

Standard library only, and everything goes through the user's own kubectl: its contexts, logins and
rights are what counts here. kubectl.py runs it, podproxy.py asks the trainers, gang.py reads what
they say, commands/ has one file per command.
"""

__version__ = "0.1.0"
