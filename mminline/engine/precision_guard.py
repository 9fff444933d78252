"""Finds the layer where numbers stop being numbers."""
import logging
from typing import Any, Iterator, List, NamedTuple, Tuple

import torch
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mminline.registry import HOOKS

ACTIONS = ('raise', 'warn')


class Call(NamedTuple):
    """A layer, and what its forward was called with."""
    name: str
    layer: nn.Module
    inputs: Tuple[tuple, dict]

    def __str__(self) -> str:
        return f'{self.name} ({type(self.layer).__name__})'


@HOOKS.register_module()
class PrecisionGuardHook(Hook):
    """Names the first layer whose output is not finite, and the range of the input that it saw.

    It watches the output of every layer, in one of ``interval`` iterations of training, validation and test and
    in whatever precision they run. In between, nothing is attached to the model. Where a layer already received
    what is not finite, the layer around it that received finite numbers is named: its own ``forward`` made them.

    Args:
        action: 'raise' ends the run with a FloatingPointError; 'warn' logs a warning and goes on.
        interval: Iterations from one that is checked to the next; the first one is checked.

    Raises:
        ValueError: If an argument is not one of these.
    """

    def __init__(self, action: str = 'raise', interval: int = 50):
        if action not in ACTIONS:
            raise ValueError(f'action must be one of {ACTIONS}, got {action!r}')
        if not isinstance(interval, int) or interval < 1:
            raise ValueError(f'interval must be a positive int, got {interval!r}')
        self.action = action
        self.interval = interval
        self._handles: List[RemovableHandle] = []
        self._calls: List[Call] = []  # that have not returned yet, the innermost last
        self._iteration = ''

    def _before_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, mode: str = 'train') -> None:
        self._stop_watching()  # an iteration that failed ends without notice
        iteration = runner.iter if mode == 'train' else batch_idx
        if iteration % self.interval:
            return
        self._iteration = f'{mode} iteration {iteration + 1}'
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        for name, layer in model.named_modules():
            self._watch(name or 'the model', layer)

    def _after_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None,
                    mode: str = 'train') -> None:
        self._stop_watching()

    def _watch(self, name: str, layer: nn.Module) -> None:
        def begin(layer: nn.Module, args: tuple, kwargs: dict) -> None:
            self._calls.append(Call(name, layer, (args, kwargs)))

        def end(layer: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            # Recomputation for a backward pass may leave a layer in the middle: such calls never end.
            while self._calls and self._calls.pop().layer is not layer:
                pass
            if not _is_finite(output):
                self._report(Call(name, layer, (args, kwargs)))

        self._handles += [layer.register_forward_pre_hook(begin, with_kwargs=True),
                          layer.register_forward_hook(end, with_kwargs=True)]

    def _report(self, seen_in: Call) -> None:
        """Raise or warn, once an iteration: what follows is not finite either."""
        calls = [*self._calls, seen_in]
        self._stop_watching()
        maker = next((call for call in reversed(calls) if _is_finite(call.inputs)), None)
        if maker is None:
            maker = calls[0]
            text = f'{maker} received an input that is not finite'
        elif maker is seen_in:
            text = f'the output of {maker} is not finite'
        else:
            text = f'{maker} made numbers that are not finite and handed them to {seen_in}'
        message = f'{self._iteration}: {text}. Input of {maker.name}: {_describe(maker.inputs)}.'
        broken = [name for name, parameter in maker.layer.named_parameters() if not _is_finite(parameter)]
        if broken:
            message += f' Parameters of it that are not finite: {", ".join(broken)}.'
        if self.action == 'raise':
            raise FloatingPointError(message)
        print_log(message, logger='current', level=logging.WARNING)

    def _stop_watching(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls.clear()


def _floating_point_tensors(value: Any) -> Iterator[Tensor]:
    """Yield those of an input or output: a tensor, or sequences and dicts of them."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _floating_point_tensors(item)


def _is_finite(value: Any) -> bool:
    return all(bool(x.isfinite().all()) for x in _floating_point_tensors(value))


@torch.no_grad()
def _describe(value: Any) -> str:
    texts = []
    for x in _floating_point_tensors(value):
        finite = x[x.isfinite()]
        text = f'{str(x.dtype).removeprefix("torch.")} {tuple(x.shape)}'
        if len(finite):
            text += f' from {float(finite.min()):.3g} to {float(finite.max()):.3g}'
        texts.append(f'{text}, {1 - len(finite) / max(1, x.numel()):.2%} not finite')
    return '; '.join(texts) or 'no floating point tensor'
