"""Model FLOPs utilisation: the share of a GPU's peak that useful arithmetic takes.

Useful is what forward and backward need, counted as PaLM's appendix B and nanoGPT do, whatever is
really computed. The peak is assumed: what NVIDIA states for dense bf16 in the SXM form. A PCIe card
of the same name, or one that is throttled, has a lower one, so its true MFU is higher than shown.
"""

import math
import time

#: FLOP/s of one GPU.
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


def peak(gpu: str) -> float | None:
    """Of a GPU by its name, as torch.cuda.get_device_name() gives it; None: not known."""
    return next((flops for name, flops in PEAKS.items() if name in gpu), None)


def flop_per_token(parameters: int, layers: int, width: int, context: int) -> float:
    """Forward and backward. ``parameters``: without those for places, which are only added."""
    return 6 * parameters + 12 * layers * width * context


class Speed:
    """Of a training on ``gpus`` GPUs of one name: tokens per second, and the MFU that makes."""

    def __init__(self, tokens_per_step: int, flop_per_token: float, gpu: str, gpus: int) -> None:
        self.tokens, self.flop, self.gpu, self.gpus = tokens_per_step, flop_per_token, gpu, gpus
        self.steps, self.since, self.warm = 0, 0.0, False

    def after_step(self, every: int = 100) -> str:
        """What to print after this step: after every 100th the mean of these, else nothing."""
        if not self.warm:  # the first step compiles
            self.warm, self.since = True, time.perf_counter()
            return ""
        self.steps += 1
        if self.steps < every:
            return ""
        now = time.perf_counter()
        rate = self.steps * self.tokens / (now - self.since)
        self.steps, self.since = 0, now
        most = peak(self.gpu)
        share = rate * self.flop / self.gpus / most if most else math.nan
        assumed = f"of {most / 1e12:.0f} TFLOPS" if most else "(peak unknown)"
        return f"{rate:,.0f} tokens/s, MFU {share:.1%} {assumed}, {self.gpus} x {self.gpu}"
