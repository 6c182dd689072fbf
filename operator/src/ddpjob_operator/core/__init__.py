"""The pure heart of the operator: state in, actions out. Start reading at plan.py."""
