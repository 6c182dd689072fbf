"""Models that torch.compile works on: by the script, or by prepare(compile=...)."""

from __future__ import annotations

import torch

from ddpjob_trainer.options import ModelOptions, Options


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether torch.compile() or Module.compile() has been called on it or a part of it."""
    return any(
        part._compiled_call_impl is not None or hasattr(part, "_orig_mod")
        for part in module.modules()
    )


def compile_in_place(
    module: torch.nn.Module, options: Options, model_options: ModelOptions, device: torch.device
) -> None:
    """Parameters keep their names, the module stays the user's."""
    if not model_options.compile:
        return
    backend = "inductor" if model_options.compile is True else model_options.compile
    if options.level != "off" and device.type != "cpu" and backend == "inductor":
        # It would choose kernels by how long they take, and with them the order of additions.
        import torch._inductor.config as inductor

        if hasattr(inductor, "deterministic"):
            setattr(inductor, "deterministic", True)  # noqa: B010
    if options.level != "off":
        # The warm-up runs backward twice on one graph; donated buffers would be gone by then.
        import torch._functorch.config as functorch

        setattr(functorch, "donated_buffer", False)  # noqa: B010
    from torch._dynamo import config, trace_rules

    # Module.compile() looks at frames that are not torch's own: a Sequential has none, and nothing
    # would be compiled, silently.
    with config.patch(wrap_top_frame=bool(trace_rules.check(module.forward))):
        module.compile(backend=backend)
