"""Show a DDPJob's state and story to the person who waits for it: `kubectl ddp`.

Standard library only, and everything goes through the user's own kubectl, with its contexts, logins
and rights. kubectl.py runs it, podproxy.py asks the trainers, gang.py reads their answers,
commands/ has one file per command.
"""

__version__ = "0.1.0"
