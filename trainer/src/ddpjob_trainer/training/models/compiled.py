"""Compile models in place, keep their bits, by torch.compile in the script or in prepare()."""

from __future__ import annotations

import sys

import torch

from ddpjob_trainer.options import ModelOptions


def compile_in_place(module: torch.nn.Module, options: ModelOptions) -> None:
    """Compile a module in place. Parameters keep their names, the module stays the user's."""
    if not options.compile:
        return
    backend = "inductor" if options.compile is True else options.compile
    from torch._dynamo import config, trace_rules

    # Module.compile() looks at frames that are not torch's own: a Sequential has none, and nothing
    # would be compiled, silently.
    with config.patch(wrap_top_frame=bool(trace_rules.check(module.forward))):
        module.compile(backend=backend)


def keep_bits(level: str, device: torch.device) -> None:
    """Set the compilers, before anything runs, to keep the bits of all that they compile."""
    if level == "off" or "torch._dynamo" not in sys.modules:  # else there is nothing to compile
        return
    # The warm-up runs backward twice on one graph; donated buffers would be gone by then.
    import torch._functorch.config as functorch

    setattr(functorch, "donated_buffer", False)  # noqa: B010
    if device.type == "cpu":
        return
    # It would choose kernels by how long they take, and with them the order of additions.
    import torch._inductor.config as inductor

    if hasattr(inductor, "deterministic"):
        setattr(inductor, "deterministic", True)  # noqa: B010
