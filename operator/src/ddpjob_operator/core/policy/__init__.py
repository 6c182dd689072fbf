"""One file per policy; plan.py asks them in order. Each turns a View into a Change."""
