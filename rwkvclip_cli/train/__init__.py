"""Training: `train(TrainConfig(...))` is one rank of a run.

>>> from rwkvclip_cli.train import TrainConfig, train
"""

from rwkvclip_cli.config import TrainConfig
from rwkvclip_cli.train.loop import train
from rwkvclip_cli.train.run import TrainResult

__all__ = ["TrainConfig", "TrainResult", "train"]
