"""One rank of a sharded run is killed or raises, wherever: all others end with the cause, and none hangs."""

from __future__ import annotations

import os
import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero import ShardedBalancedStrategy
from tests.ranks.base.test_first_cause import CAUSE, screens
from tests.ranks.sharded.checkpoint_kit import Sharded
