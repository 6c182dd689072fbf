"""Writes a file where it is started."""

import sys

with open(sys.argv[1], "w") as file:
    file.write("ready\n")
