"""A node: its start and end (machine), its inside (nodespace), network, cgroups and volumes."""
