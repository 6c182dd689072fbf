"""Keep small values of the loop in snapshots, as attributes: run.state().

A variable loses its value in each restart. These are registered as they are made, so they do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddpjob_trainer.errors import ConfigError

_PLAIN = (bool, int, float, str, type(None))


class Values:
    """Attributes that hold numbers, strings, None, and tuples of them; no others than at first."""

    def __init__(self, values: dict[str, Any]) -> None:
        object.__setattr__(self, "_values", {})
        for name, value in values.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ConfigError(f"run.state({name}=...): choose another name")
            self._values[name] = _plain(name, value)

    def __getattr__(self, name: str) -> Any:
        """Return a value. Only asked for what is no attribute of the class."""
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"run.state() was not given {name!r}")
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """Take a value. Raises ConfigError for a name that run.state() was not given."""
        if name not in self._values:
            raise ConfigError(
                f"run.state() was not given {name!r}: name all values there, with what they begin"
                f" with. It has {', '.join(self._values)}"
            )
        self._values[name] = _plain(name, value)

    def __repr__(self) -> str:
        """Show the values."""
        return f"state({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def state_dict(self) -> dict[str, Any]:
        """Return all values by name."""
        return dict(self._values)

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Put values back. A name that is new keeps what it begins with."""
        self._values.update({name: state[name] for name in self._values if name in state})


def _plain(name: str, value: Any) -> Any:
    """Turn numbers of numpy into Python's; refuse tensors, which keep a graph or change later."""
    if isinstance(value, tuple):
        return tuple(_plain(name, part) for part in value)
    found = value.item() if isinstance(value, np.generic) else value
    if type(found) not in _PLAIN:
        raise ConfigError(
            f"run.state(): {name} cannot be a {type(value).__name__}; it holds numbers, strings,"
            " None, and tuples of these. Of a tensor take .item(); keep others by run.register()"
        )
    return found
