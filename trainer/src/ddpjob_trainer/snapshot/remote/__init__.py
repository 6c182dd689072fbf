"""Snapshots in an object store: copied there beside training, fetched where a disk is fresh."""
