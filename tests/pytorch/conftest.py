"""One thread: the same bits each time, and no quarrel over the cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
