"""The scores of a test run: where they are, what they are called, and as a table."""
import json
from pathlib import Path
from typing import NamedTuple, Union

from rich.table import Table


class Score(NamedTuple):
    """How a toolbox reports a score, in a test as in a validation."""

    name: str  # in the results
    out_of: float = 1  # what a perfect model gets; 100 where percent are reported

    def fraction(self, results: dict) -> float:
        """The score, from 0 to 1.

        Raises:
            ValueError: If the results lack it.
        """
        if self.name not in results:
            raise ValueError(f"no {self.name} was reported, only: {', '.join(sorted(results)) or 'nothing'}")
        return results[self.name] / self.out_of


# What is reported, by the toolbox (default_scope) that computes it, as rows and columns of a table. The first
# column of a row is its main score.
REPORTED = {
    'mmdet': {
        'box': {
            'mAP': Score('coco/bbox_mAP'),
            'AP50': Score('coco/bbox_mAP_50'),
            'AP75': Score('coco/bbox_mAP_75'),
        },
        'mask': {
            'mAP': Score('coco/segm_mAP'),
            'AP50': Score('coco/segm_mAP_50'),
            'AP75': Score('coco/segm_mAP_75'),
        },
    },
    'mmseg': {
        'label map': {
            'mIoU': Score('mIoU', out_of=100),
            'mAcc': Score('mAcc', out_of=100),
            'aAcc': Score('aAcc', out_of=100),
        },
    },
}


def read_test_results(work_dir: Union[str, Path]) -> dict:
    """Reads what the latest test in a work dir wrote to ``TIMESTAMP/TIMESTAMP.json``.

    Args:
        work_dir: The ``--work-dir`` of tools/test.py.

    Returns:
        The results by name, such as ``'coco/bbox_mAP'``, as the toolbox reports them.

    Raises:
        FileNotFoundError: If no test has finished in that folder.
    """
    results = sorted(path for path in Path(work_dir).glob('*/*.json') if path.stem == path.parent.name)
    if not results:
        raise FileNotFoundError(f'{work_dir} holds no results of a test (TIMESTAMP/TIMESTAMP.json)')
    return json.loads(results[-1].read_text())


def main_scores(scope: str) -> dict[str, Score]:
    """The main scores, by what a reader calls them (``'box mAP'``).

    Args:
        scope: The config's ``default_scope``.

    Raises:
        ValueError: If no scores are known for that toolbox.
    """
    scores = {}
    for row, columns in _reported(scope).items():
        column, score = next(iter(columns.items()))
        scores[f'{row} {column}'] = score
    return scores


def score_table(results: dict, scope: str, title: str) -> Table:
    """A table of all reported scores, from 0 to 1, for rich to print.

    Args:
        results: From :func:`read_test_results`.
        scope: The config's ``default_scope``.
        title: Text above the table.

    Raises:
        ValueError: If no scores are known for that toolbox, or the results lack one.
    """
    rows = _reported(scope)
    table = Table(title=title, title_justify='left')
    table.add_column()
    for column in next(iter(rows.values())):
        table.add_column(column, justify='right')
    for row, columns in rows.items():
        table.add_row(row, *(f'{score.fraction(results):.3f}' for score in columns.values()))
    return table


def too_low(results: dict, scope: str, minimum: float) -> list[str]:
    """One sentence for each main score that does not reach a minimum (from 0 to 1); other arguments and errors as
    in :func:`score_table`."""
    sentences = []
    for label, score in main_scores(scope).items():
        value = score.fraction(results)
        if not value >= minimum:  # NaN is too low as well
            sentences.append(f'{label} is {value:.3f}, at least {minimum:g} is asked for')
    return sentences


def _reported(scope: str) -> dict[str, dict[str, Score]]:
    if scope not in REPORTED:
        raise ValueError(f"scores are known for {', '.join(REPORTED)}, got default_scope={scope!r}")
    return REPORTED[scope]
