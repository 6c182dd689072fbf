"""Restart a gang after the loss of a member, and decide who pays for it."""
