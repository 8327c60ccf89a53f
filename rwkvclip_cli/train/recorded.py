"""The forward and backward pass of a step as a CUDA graph: recorded once, then a single launch for the host.

>>> recorded = RecordedPass(forward_backward, images, tokens, draws)
>>> loss = recorded(images, tokens, draws)

A step has some two thousand kernels, and the host needs about as long to launch them as a GPU to run them; what else
it has to do, such as to decode images, then keeps the GPU waiting.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class RecordedPass:
    """`forward_backward` on one set of inputs, which every call fills anew; gradients stay where they were recorded.

    To be made when nothing is compiled any more and no parameter has a gradient. Gradients must not be set to None
    from then on: each call overwrites them.
    """

    def __init__(self, forward_backward: Callable[..., Tensor], *inputs: Tensor | None) -> None:
        """Record without running: `inputs` give shapes and types, and None what is not there in any call."""
        self._inputs = inputs
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of this process go on with what they do, such as to watch over collectives.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._loss = forward_backward(*inputs)

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """The loss, (), which the next call overwrites. Raises ValueError for other shapes than were recorded."""
        for own, given in zip(self._inputs, inputs, strict=True):
            if own is None and given is None:
                continue
            if own is None or given is None or own.shape != given.shape:
                shapes = [None if x is None else tuple(x.shape) for x in (own, given)]
                raise ValueError(f"recorded with an input of shape {shapes[0]}; got {shapes[1]}")
            own.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._loss
