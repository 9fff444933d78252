"""Trains the five detectors of configs/ablation with several seeds, and writes the table of docs/ablation.md.

Each run has one thread, and as many run side by side as ``--jobs`` says. Run again, it goes on where it stopped:
results are kept in the work dir. The data are those of ``tools/make_shapes.py``.

Exit status: 0; 1 if a run fails.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.progress import track

from mminline.analysis.curves import read_scalars
from mminline.analysis.scores import REPORTED

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = ('inline', 'inline-no-local', 'inline-no-center', 'linear', 'softmax')
SCORES = {name: row['mAP'] for name, row in REPORTED['mmdet'].items()}


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description='Train the ablation on the shapes data, and write its table.')
    parser.add_argument('--epochs', type=int, default=4, metavar='E', help='of each run (%(default)s)')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2], metavar='S', help='seeds (0 1 2)')
    parser.add_argument('--jobs', type=int, default=2, metavar='N', help='runs side by side (%(default)s)')
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/ablation'), metavar='DIR',
                        help='folder for the runs, and for table.md (%(default)s)')
    return parser.parse_args(argv)


def train(variant: str, seed: int, epochs: int, work_dir: Path) -> dict:
    """Train and validate one detector in its own folder; return its scores and the seconds it took."""
    result = work_dir / 'result.json'
    if not result.exists():
        work_dir.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with (work_dir / 'output.txt').open('w') as log:
            status = subprocess.run(
                [sys.executable, ROOT / 'tools/train.py', ROOT / f'configs/ablation/pvt_maskrcnn_{variant}.py',
                 '--work-dir', work_dir, '--cfg-options', f'randomness.seed={seed}', f'train_cfg.max_epochs={epochs}',
                 f'train_cfg.val_interval={epochs}', f'default_hooks.checkpoint.interval={epochs}',
                 f'param_scheduler.1.end={epochs}', f'param_scheduler.1.T_max={epochs}'],
                stdout=log, stderr=log, env={**os.environ, 'OMP_NUM_THREADS': '1'}).returncode
        if status:
            raise SystemExit(f'A run failed with exit status {status}, see {log.name}')
        scores = read_scalars(work_dir)[-1]
        result.write_text(json.dumps(
            {name: score.fraction(scores) for name, score in SCORES.items()} | {'seconds': time.monotonic() - started}))
    return json.loads(result.read_text())


def table(results: dict[str, list[dict]]) -> str:
    """The results of each variant, one of every seed, as a table in Markdown."""
    lines = [f'| config | {" | ".join(f"{name} mAP, mean" for name in SCORES)} | range | seconds |',
             '| --- |' + ' --- |' * (len(SCORES) + 2)]
    for variant, runs in results.items():
        means = [f'{statistics.mean(run[name] for run in runs):.3f}' for name in SCORES]
        ranges = [f'{name} {min(run[name] for run in runs):.3f} to {max(run[name] for run in runs):.3f}'
                  for name in SCORES]
        seconds = statistics.mean(run['seconds'] for run in runs)
        lines.append(f'| `pvt_maskrcnn_{variant}` | {" | ".join(means)} | {", ".join(ranges)} | {seconds:.0f} |')
    return '\n'.join(lines) + '\n'


def main(argv=None):
    args = parse_args(argv)
    # Seed by seed: what disturbs the machine for a while disturbs all variants alike.
    runs = [(variant, seed) for seed in args.seeds for variant in VARIANTS]
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(train, variant, seed, args.epochs, args.work_dir / f'{variant}_{seed}')
                   for variant, seed in runs]
        done = [future.result() for future in track(futures, description='runs')]
    results = {variant: [result for (name, _), result in zip(runs, done) if name == variant] for variant in VARIANTS}
    (args.work_dir / 'table.md').write_text(table(results))
    print(table(results))


if __name__ == '__main__':
    main()
