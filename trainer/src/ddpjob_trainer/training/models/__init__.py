"""prepare(): models, optimizers and options that go together, wrapped and registered."""
