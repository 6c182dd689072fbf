"""The library's heart: start() -> Run -> prepare() -> Loop -> Step. Everything else serves it."""
