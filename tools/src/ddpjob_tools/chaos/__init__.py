"""Run a script undisturbed, then under kills, and compare every bit."""
