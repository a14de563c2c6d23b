"""A small GPT, data-parallel over two processes, watched. Without Ray: Foreshock starts a small Ray beside the job.

    torchrun --nproc-per-node 2 examples/torchrun.py

Then `foreshock runs` and `foreshock status foreshock_runs/RUN`. Every rank calls `watch`; what rank 0 says counts.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import foreshock
from foreshock.lab.corpus import corpus
from foreshock.lab.data import ByteBatches
from foreshock.lab.model import GPT

STEPS = int(os.environ.get("STEPS", "300"))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.02, total_iters=50)
    loader = ByteBatches(corpus("code"), seed=0, steps=STEPS, batch=8 * world, part=(rank, world))
    with foreshock.watch(model, optimizer, state={"scheduler": scheduler}, allow="observe") as watch:
        for tokens, targets in watch.batches(loader):
            loss = model(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            verdict = watch.step(loss)
            if rank == 0 and verdict.step % 50 == 0:
                print(f"step {verdict.step}: loss {loss.item():.3f}", flush=True)
            if verdict.stop:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
