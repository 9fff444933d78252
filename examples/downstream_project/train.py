"""Trains a config: ``python train.py configs/inline_swin_retinanet.py``, with the options of mminline's tool."""
import argparse

from mminline import runs

parser = argparse.ArgumentParser(description='Train a detector.', parents=[runs.common_arguments()])
args = parser.parse_args()
with runs.exit_on_run_error(parser):
    runs.train(runs.load_config(args))
