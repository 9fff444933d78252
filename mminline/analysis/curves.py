"""Curves of a training run: its losses, learning rate and validation scores."""
import json
from pathlib import Path
from typing import Union

from matplotlib.figure import Figure

from .scores import Score


def read_scalars(work_dir: Union[str, Path]) -> list[dict]:
    """Reads what mmengine's ``LocalVisBackend`` recorded in a work dir.

    A run that was resumed has one file for each start. What an earlier start recorded beyond the checkpoint that a
    later one went on from is left out.

    Args:
        work_dir: The ``--work-dir`` of tools/train.py.

    Returns:
        The records in the order of training. Training records hold ``loss``, ``lr``, ``iter`` and more, validation
        records the scores; 'iter' is added to these. (Their own ``step`` counts epochs in some configs and iterations
        in others.) It is the latest logged iteration before the validation, thus at most the logging interval too
        small.

    Raises:
        ValueError: If there are no training records, or a line is no JSON object.
    """
    records = []
    for path in sorted(Path(work_dir).glob('*/vis_data/scalars.json')):
        start = _read_lines(path)
        first = next((record['iter'] for record in start if 'loss' in record), None)
        if first is None:
            continue
        records = [record for record in records if record['iter'] < first]
        iteration = first - 1  # of a validation before training
        for record in start:
            iteration = record.setdefault('iter', iteration)
            records.append(record)
    if not records:
        raise ValueError(f'{work_dir} has no records of training (TIMESTAMP/vis_data/scalars.json with a loss)')
    return records


def _read_lines(path: Path) -> list[dict]:
    lines = path.read_text().split('\n')[:-1]  # the last one is empty, or a killed run did not finish it
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise ValueError(f'{path}, line {number}: expected a JSON object, got {line[:80]!r}')
        records.append(record)
    return records


def draw_curves(records: list[dict], scores: dict[str, Score], out_file: Union[str, Path]) -> None:
    """Draws loss terms, learning rate and validation scores over the iterations.

    Args:
        records: From :func:`read_scalars`.
        scores: For each label in the picture, a score of the validation records.
        out_file: The picture to write.
    """
    figure = Figure(figsize=(9, 10), layout='constrained')
    loss_axes, rate_axes, score_axes = figure.subplots(3, sharex=True, height_ratios=(3, 1, 2))

    terms = [name for name in records[0] if name.rpartition('.')[2].startswith('loss')]
    for name in sorted(terms, key=lambda name: name != 'loss'):
        is_sum = name == 'loss'
        loss_axes.plot(*_series(records, name), label='loss (sum of all terms)' if is_sum else name,
                       color='black' if is_sum else None, linewidth=2 if is_sum else 1.5)
    loss_axes.set(title='Training loss', ylabel='loss', yscale='log')
    rate_axes.plot(*_series(records, 'lr'), color='black')
    rate_axes.set(title='Learning rate', ylabel='learning rate', ylim=(0, None))
    rate_axes.ticklabel_format(axis='y', scilimits=(0, 0))
    for label, score in scores.items():
        iterations, values = _series(records, score.name)
        score_axes.plot(iterations, [value / score.out_of for value in values], marker='o', label=label)
    score_axes.set(title='Scores on the validation images', xlabel='iteration', ylabel='score', ylim=(0, 1))
    for axes in (loss_axes, rate_axes, score_axes):
        axes.grid(alpha=0.3)
        axes.spines[['top', 'right']].set_visible(False)
    for axes in (loss_axes, score_axes):
        # Beside the axes, where no curve can run through it.
        axes.legend(loc='upper left', bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(out_file, dpi=120)


def _series(records: list[dict], name: str) -> tuple[list[int], list[float]]:
    """Iterations and values of one quantity."""
    pairs = [(record['iter'], record[name]) for record in records if name in record]
    return [iteration for iteration, _ in pairs], [value for _, value in pairs]
