"""Train: start() -> Run -> prepare() -> Loop -> Step. Everything else serves it."""
