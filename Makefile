# make test, make demo, make demo-seg: each does all of its own set-up (.venv, torch, mmcv with compiled ops).
TORCH ?= torch==2.13.0
PYTHON ?= python3
python := .venv/bin/python
export TORCH PYTHON

.PHONY: help setup test test-fast lint demo demo-seg clean

help:
	@echo 'make test       set up, check the style, run all tests'
	@echo 'make test-fast  the same without the tests marked slow'
	@echo 'make demo       set up, make a data set, train and test Mask R-CNN on it, draw the predictions'
	@echo 'make demo-seg   the same in segmentation, with UperNet'
	@echo 'make setup      only make .venv (TORCH=$(TORCH), PYTHON=$(PYTHON))'

setup:
	@tools/setup_env.sh

test: lint
	$(python) -m pytest -n 2 --dist loadgroup

test-fast: lint
	$(python) -m pytest -n 2 --dist loadgroup -m 'not slow'

lint: setup
	$(python) -m ruff check .

demo: setup
	$(python) tools/demo.py configs/demo/inline_pvt_maskrcnn_shapes.py --work-dir work_dirs/demo

demo-seg: setup
	$(python) tools/demo.py configs/demo/inline_swin_upernet_shapes.py --work-dir work_dirs/demo_seg --min-score 0.80

clean:
	rm -rf .venv build dist *.egg-info
