"""Makes the shapes data set, trains and tests a config on it, and shows how it went.

The steps are tools/make_shapes.py, tools/train.py and tools/test.py, called as anyone would call them. Then follow a
table of scores and two pictures in the work dir: predictions.png (ground truth beside predictions) and curves.png
(losses, learning rate, validation scores).

It can be run again: data that is there stays, an interrupted training goes on from its last checkpoint, and a
complete one leads straight to the test. To train anew, say with a changed config, delete the work dir.

Exit status: 0; 1 if a step fails or a score is too low; 2 for wrong arguments.
"""
import argparse
import os
import shlex
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

from mmengine.config import Config
from mmengine.runner import find_latest_checkpoint
from rich.console import Console
from rich.table import Table

from mminline.analysis.curves import draw_curves, read_scalars
from mminline.analysis.pictures import draw_predictions
from mminline.analysis.scores import main_scores, read_test_results, score_table, too_low


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description='Train, test and look at a config on the shapes data set.')
    parser.add_argument('config', metavar='CONFIG', help='config file')
    parser.add_argument('--work-dir', type=Path, required=True, metavar='DIR',
                        help='folder for the run and the pictures')
    parser.add_argument('--min-score', type=float, default=0.75, metavar='X',
                        help='lowest score to be content with, from 0 to 1 (%(default)s): mAP of boxes and of masks '
                        'in detection, mIoU in segmentation')
    return parser.parse_args(argv)


def run(tool: str, *arguments: object) -> None:
    """Runs a script of this folder, and ends the demo if that fails."""
    command = [os.path.relpath(sys.executable), os.path.relpath(Path(__file__).with_name(tool)), *map(str, arguments)]
    print(f'\n$ {shlex.join(command)}', flush=True)
    status = subprocess.run(command).returncode
    if status:
        sys.exit(f'The demo stops here: {tool} ended with exit status {status}.')


@contextmanager
def timed(seconds: dict, step: str):
    started = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - started


def main(argv=None):
    args = parse_args(argv)
    seconds = {}
    with timed(seconds, 'data'):
        run('make_shapes.py')
    is_resumed = (args.work_dir / 'last_checkpoint').exists()
    with timed(seconds, 'training, resumed' if is_resumed else 'training'):
        run('train.py', args.config, '--work-dir', args.work_dir, '--resume')
    checkpoint = os.path.relpath(find_latest_checkpoint(str(args.work_dir)))
    test_dir = args.work_dir / 'test'
    with timed(seconds, 'test'):
        run('test.py', args.config, checkpoint, '--work-dir', test_dir)

    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'pkg_resources is deprecated')  # mmengine finds mmdet:: with it
        cfg = Config.fromfile(args.config)
    scope = cfg.default_scope
    predictions, curves = (args.work_dir / name for name in ('predictions.png', 'curves.png'))
    with timed(seconds, 'pictures'):
        draw_predictions(cfg, checkpoint, predictions)
        draw_curves(read_scalars(args.work_dir), main_scores(scope), curves)

    times = Table(title='Seconds, on this machine', title_justify='left')
    times.add_column('step')
    times.add_column('wall time', justify='right')
    for step, value in seconds.items():
        times.add_row(step, f'{value:.0f}')
    times.add_row('all', f'{sum(seconds.values()):.0f}', style='bold')
    results = read_test_results(test_dir)
    console = Console(soft_wrap=True)
    console.print()
    console.print(times, score_table(results, scope, title=f'Scores of {checkpoint} on held-out images'))
    console.print(f'Pictures: {predictions}, {curves}')

    failures = too_low(results, scope, args.min_score)
    if failures:
        sys.exit(f"Not good enough: {'; '.join(failures)}.")


if __name__ == '__main__':
    main()
