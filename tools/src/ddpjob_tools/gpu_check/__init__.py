"""Check this package's promises on this machine's GPUs: `ddpjob gpu-check`.

command -> checks -> launches, which start probe (torch alone), workload (this library) and chaos as
processes of their own: no check is in the way of another, and the command itself imports no torch.
"""
