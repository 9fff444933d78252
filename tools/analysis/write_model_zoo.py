"""Writes the tables of all models: docs/model_zoo.md, the one in README.md, configs/metafile.yml, model-index.yml.

To be run after a config or a backbone has changed. Exit status with --check: 1 if a file is stale.
"""
import argparse
import sys
from pathlib import Path

from mminline.analysis.model_zoo import render, stale_files

ROOT = Path(__file__).resolve().parents[2]


def parse_args():
    parser = argparse.ArgumentParser(description='Write the tables of all models.')
    parser.add_argument('--check', action='store_true', help='write nothing, name the files that are stale')
    return parser.parse_args()


def main():
    args = parse_args()
    files = render(ROOT)
    stale = stale_files(files)
    for path in stale:
        if not args.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[path], encoding='utf-8')
        print(f'{path.relative_to(ROOT)}: {"stale" if args.check else "written"}')
    if not stale:
        print('Every table is up to date.')
    elif args.check:
        sys.exit(1)


if __name__ == '__main__':
    main()
