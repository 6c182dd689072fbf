"""Point to point: send and recv, isend and irecv, and why a tensor is left alone until wait().

    ddpjob-trainer run --nproc 3 send_recv.py
    torchrun --nproc-per-node 3 send_recv.py

Plain torch.distributed, nothing of ours. Any number of processes from 2 on.
"""

import os

import torch
import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one for each process here
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
# Blocks until all `world` processes have come to MASTER_ADDR:MASTER_PORT.
dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
assert world >= 2, "a message needs two processes: --nproc 2"

# --- Blocking ---------------------------------------------------------------------------------
# A number goes round, and every rank adds its own. recv() returns when the tensor is filled;
# send() when it may be changed again, which does not mean that the other side has it.
number = torch.zeros(1, device=device)
if rank > 0:
    dist.recv(number, src=rank - 1)
number += rank
dist.send(number, dst=(rank + 1) % world)
if rank == 0:
    dist.recv(number, src=world - 1)
    assert number == sum(range(world))
    print(f"blocking: the sum that came round is {int(number)}", flush=True)

# --- Immediate --------------------------------------------------------------------------------
# All pass something to the right at the same time; with blocking calls somebody would have to
# begin with recv(). isend() and irecv() return a Work at once, and it is done after its wait().
# batch_isend_irecv() starts several as one, which NCCL needs where they depend on each other.
mine = torch.full((4,), float(rank), device=device)
got = torch.empty_like(mine)
to_the_right = dist.P2POp(dist.isend, mine, (rank + 1) % world)
from_the_left = dist.P2POp(dist.irecv, got, (rank - 1) % world)
for work in dist.batch_isend_irecv([to_the_right, from_the_left]):
    work.wait()  # gloo: this process waits. NCCL: the current CUDA stream does, Python goes on
assert (got == (rank - 1) % world).all()
if rank == 0:
    print(f"immediate: my left neighbour sent {got.tolist()}", flush=True)

# --- Not before wait() ------------------------------------------------------------------------
# Neither call copies: the tensor's own memory is read, or filled, whenever the transport comes to
# it. Ranks 0 and 1 break the rule here. Elsewhere what happens then is chance; here the small
# messages decide what comes first, so it can be seen every time. By gloo on all machines: NCCL
# would queue these messages one behind the other, and wait for ever.
gloo = dist.new_group(backend="gloo")
SMALL, LARGE, ANSWER = 1, 2, 3  # tags: which message is meant when two are on their way
if rank == 0:
    letter = torch.full((1000,), 1.0)
    work = dist.isend(letter, 1, group=gloo, tag=LARGE)
    letter.fill_(-1.0)  # wrong: wait() has not returned
    dist.send(torch.zeros(1), 1, group=gloo, tag=SMALL)
    work.wait()
    dist.recv(torch.zeros(1), 1, group=gloo, tag=SMALL)
    dist.send(torch.ones(1000), 1, group=gloo, tag=ANSWER)
elif rank == 1:
    letter = torch.zeros(1000)
    dist.recv(torch.zeros(1), 0, group=gloo, tag=SMALL)  # rank 0 has changed its tensor by now
    dist.recv(letter, 0, group=gloo, tag=LARGE)
    spoilt = int((letter == -1).sum())
    print(f"changed before wait(): {spoilt} of 1000 numbers arrived as -1, sent as 1", flush=True)

    answer = torch.zeros(1000)
    work = dist.irecv(answer, 0, group=gloo, tag=ANSWER)
    early = int(answer.sum())  # wrong: nothing has come yet
    dist.send(torch.zeros(1), 0, group=gloo, tag=SMALL)
    work.wait()
    print(f"read before wait(): {early} of 1000 ones, after it {int(answer.sum())}", flush=True)

# Who holds a group keeps its threads; they should end before Python does.
del to_the_right, from_the_left, work, gloo
dist.destroy_process_group()
