"""The moving average: torch's own, in its bits."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddpjob_trainer.optim.update import make_ema


def model() -> nn.Module:
    torch.manual_seed(1)
    half = nn.Linear(3, 3).to(torch.bfloat16)
    return nn.ModuleDict({"norm": nn.BatchNorm1d(4), "conv": nn.Conv2d(2, 3, 3), "low": half})


def test_its_bits_are_torchs():
    one, other = model(), model()
    mine = make_ema(one, 0.9)
    assert mine is not None
    theirs = AveragedModel(other, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    for turn in range(5):
        for trained in (one, other):
            torch.manual_seed(turn)
            with torch.no_grad():
                for tensor in (*trained.parameters(), *trained.buffers()):
                    if tensor.is_floating_point():
                        tensor.add_(torch.randn_like(tensor))
        mine.update_parameters(one)
        theirs.update_parameters(other)
    mine_state, theirs_state = mine.state_dict(), theirs.state_dict()
    assert list(mine_state) == list(theirs_state)
    for name, tensor in mine_state.items():
        assert torch.equal(tensor, theirs_state[name]), name
    assert int(mine.n_averaged) == 5
    on_device = make_ema(nn.Linear(2, 2, device="meta"), 0.9)
    assert on_device.n_averaged.device.type == "cpu", "a GPU would be waited for to read it"
