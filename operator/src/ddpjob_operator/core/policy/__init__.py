"""Define one policy per file; plan.py asks them in order. Each turns a View into a Change."""
