"""Training: `train(TrainConfig(...))` is one rank of a run.

>>> from rwkvclip_cli.train import TrainConfig, train

The loop is loaded when it is first asked for: the losses alone need neither DALI nor the model.
"""

from typing import TYPE_CHECKING, Any

from rwkvclip_cli.config import TrainConfig

if TYPE_CHECKING:
    from rwkvclip_cli.train.loop import train
    from rwkvclip_cli.train.run import TrainResult

__all__ = ["TrainConfig", "TrainResult", "train"]


def __getattr__(name: str) -> Any:
    if name == "train":
        from rwkvclip_cli.train.loop import train

        return train
    if name == "TrainResult":
        from rwkvclip_cli.train.run import TrainResult

        return TrainResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
