"""One hash for all weights of a model, however they are sharded."""

from __future__ import annotations

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from hetero_fw.checkpoint.module_state import canonical_fqn


def weights_digest(module: nn.Module) -> str:
    """Hash of all parameters by name: equal weights give equal digests on any number of ranks.

    Under FSDP2 all ranks call this; one parameter at a time is gathered.
    """
    parameters = {canonical_fqn(fqn): value for fqn, value in module.named_parameters()}
    digest = xxhash.xxh3_128()
    for fqn in sorted(parameters):
        value = parameters[fqn].detach()
        full = value.full_tensor() if isinstance(value, DTensor) else value
        full = full.cpu().contiguous()
        digest.update(f"{fqn} {full.dtype} {tuple(full.shape)}\n".encode())
        digest.update(full.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
