"""Looks through the data sets of a config: what they hold, and what would harm a training.

Looked for: missing, unreadable and half-written images and label maps; sizes that differ from the listed ones; boxes
that are empty or outside the image; empty and malformed masks; labels out of range; annotations without an image or a
category, classes without a category, ids given twice.

Exit status: 0 if there are no problems, 1 if there are, 2, with a message, if the data sets cannot be looked at.
"""
import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

from rich.console import Console

from mminline import runs
from mminline.analysis.dataset_check import SPLITS, check_datasets, overview_table, problem_table


def parse_args():
    parser = argparse.ArgumentParser(
        description='Look through the data sets of a config.', parents=[runs.config_arguments()])
    parser.add_argument('--split', nargs='+', choices=SPLITS, default=SPLITS, metavar='SPLIT',
                        help=f'which of the data sets: {", ".join(SPLITS)} (all)')
    parser.add_argument('--shown', type=int, default=10, metavar='N',
                        help='how many problems of a kind are named on the screen (%(default)s)')
    parser.add_argument('--out', type=Path, metavar='FILE', help='write all problems to a JSON file')
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    with runs.exit_on_run_error(parser):
        reports = check_datasets(runs.read_config(args.config, args.cfg_options), args.split)
        problems = [
            dict(data_set=report.name, **problem._asdict()) for report in reports for problem in report.problems]
        if args.out:
            try:
                args.out.write_text(json.dumps(problems, indent=2) + '\n')
            except OSError as error:
                raise runs.RunError(f'cannot write: {error}') from error

    console = Console(soft_wrap=True, highlight=False)
    console.print(overview_table(reports))
    for report in reports:
        for remark in report.remarks:
            console.print(f'{report.name}: {remark}', markup=False)
    if not problems:
        console.print('No problems.')
        return
    by_kind = defaultdict(list)
    for problem in problems:
        by_kind[problem['kind']].append(problem)
    for kind, alike in by_kind.items():
        console.print(f'\n{kind}: {len(alike)}', style='bold')
        for problem in alike[:args.shown]:
            console.print(f'  {problem["where"]}: {problem["what"]}'.removesuffix(': '), markup=False)
        if len(alike) > args.shown:
            console.print(f'  and {len(alike) - args.shown} more' + ('' if args.out else ', all of them: --out FILE'))
    console.print()
    console.print(problem_table(reports))
    sys.exit(1)


if __name__ == '__main__':
    main()
