"""Offer commands beside the core, started by cli.py alone: audit, chaos, gpu-check, init, local.

They drive the launcher and read what training records; nothing of the core imports them.
"""
