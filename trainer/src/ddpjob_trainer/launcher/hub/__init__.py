"""Coordinate the launchers: launcher 0 holds the hub, every launcher is its client.

root_cause names the failure that came first, rounds decides whether another round follows.
"""
