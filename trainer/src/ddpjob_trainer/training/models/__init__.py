"""Wrap and register models, optimizers and options that go together: prepare()."""
