"""Keep gangs of PyTorch DDP pods training until they have succeeded: the operator.

core/ is pure and decides; shell/ talks to the API server and decides nothing.
"""

__version__ = "0.2.0"
