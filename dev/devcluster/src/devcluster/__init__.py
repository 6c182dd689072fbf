"""A real local Kubernetes: built from its Go modules, run as plain processes on one machine.

The command is `dev/devcluster/devcluster`; `cli` reads it, `lifecycle` carries it out. Standard
library only: it runs before anything is installed.
"""
