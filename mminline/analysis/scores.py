"""The scores of a test run: where they are, what they are called, and as a table."""
import json
from pathlib import Path
from typing import Union

from rich.table import Table

# What is reported, by the toolbox (default_scope) that computes it: row -> column -> name in the results.
# The first column of a row is its main score.
REPORTED = {
    'mmdet': {
        'box': {'mAP': 'coco/bbox_mAP', 'AP50': 'coco/bbox_mAP_50', 'AP75': 'coco/bbox_mAP_75'},
        'mask': {'mAP': 'coco/segm_mAP', 'AP50': 'coco/segm_mAP_50', 'AP75': 'coco/segm_mAP_75'},
    },
}


def read_test_results(work_dir: Union[str, Path]) -> dict:
    """Reads what the latest test in a work dir wrote to ``TIMESTAMP/TIMESTAMP.json``.

    Args:
        work_dir: The ``--work-dir`` of tools/test.py.

    Returns:
        The results by name, such as ``'coco/bbox_mAP'``.

    Raises:
        FileNotFoundError: If no test has finished in that folder.
    """
    results = sorted(path for path in Path(work_dir).glob('*/*.json') if path.stem == path.parent.name)
    if not results:
        raise FileNotFoundError(f'{work_dir} holds no results of a test (TIMESTAMP/TIMESTAMP.json)')
    return json.loads(results[-1].read_text())


def main_score_names(scope: str) -> dict[str, str]:
    """The names of the main scores in the results, by what a reader calls them (``'box mAP'``).

    Args:
        scope: The config's ``default_scope``.

    Raises:
        ValueError: If no scores are known for that toolbox.
    """
    names = {}
    for row, columns in _reported(scope).items():
        column, name = next(iter(columns.items()))
        names[f'{row} {column}'] = name
    return names


def score_table(results: dict, scope: str, title: str) -> Table:
    """A table of all reported scores, for rich to print.

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
        table.add_row(row, *(f'{_look_up(results, name):.3f}' for name in columns.values()))
    return table


def too_low(results: dict, scope: str, minimum: float) -> list[str]:
    """One sentence for each main score that does not reach a minimum; arguments and errors as in
    :func:`score_table`."""
    sentences = []
    for label, name in main_score_names(scope).items():
        score = _look_up(results, name)
        if not score >= minimum:  # NaN is too low as well
            sentences.append(f'{label} is {score:.3f}, at least {minimum:g} is asked for')
    return sentences


def _reported(scope: str) -> dict[str, dict[str, str]]:
    if scope not in REPORTED:
        raise ValueError(f"scores are known for {', '.join(REPORTED)}, got default_scope={scope!r}")
    return REPORTED[scope]


def _look_up(results: dict, name: str) -> float:
    if name not in results:
        raise ValueError(f"the test reported no {name}, only: {', '.join(sorted(results)) or 'nothing'}")
    return results[name]
