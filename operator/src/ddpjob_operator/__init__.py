"""The ddpjob operator: keeps a gang of PyTorch DDP pods training until it has succeeded.

core/ is pure and decides; shell/ talks to the API server and decides nothing.
"""

__version__ = "0.1.0"
