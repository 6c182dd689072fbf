"""Run scripts as DDPJobs, and show the state and story of these: `kubectl ddp`.

Standard library only, and everything goes through the user's own kubectl, with its contexts, logins
and rights. kubectl.py runs it, podproxy.py asks the trainers, gang.py reads their answers,
script/ makes a manifest of a script, commands/ has one file per command.
"""

__version__ = "0.2.0"
