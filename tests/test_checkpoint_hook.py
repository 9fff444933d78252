"""Checkpoints are complete or not there, and a run that was stopped ends like one that was not."""
import builtins
import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn

from mminline.engine.checkpoint import get_random_state, set_random_state
from mminline.safe_loading import load_weights_file

ITERATIONS = dict(train_cfg=dict(type='IterBasedTrainLoop', max_iters=4, val_interval=1), by_epoch=False)
EPOCHS = dict(train_cfg=dict(by_epoch=True, max_epochs=4), by_epoch=True)
experiment = itertools.count()


class Noisy(torch.utils.data.Dataset):
    """Six samples, each drawn anew with every generator; remembers which were asked for."""

    def __init__(self):
        self.seen = []

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.seen.append(index)
        noise = random.random() + np.random.rand() + torch.rand(3)
        return dict(inputs=index + noise, targets=torch.tensor([float(index)]))


class Regressor(BaseModel):

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    def forward(self, inputs, targets, mode='tensor'):
        outputs = self.layers(inputs)
        if mode == 'loss':
            return dict(loss=nn.functional.mse_loss(outputs, targets))
        return list(outputs)


class Rising(BaseMetric):
    """Every validation is the best so far."""

    def process(self, data_batch, data_samples):
        self.results.append(1)

    def compute_metrics(self, results):
        return dict(score=float(next(experiment)))


def build(work_dir, steps=4, loop=ITERATIONS, sampler='DefaultSampler', resume=False, load_from=None, **options):
    """A run whose data, dropout and validation draw random numbers; ``options`` are those of the hook."""
    loader = dict(batch_size=2, dataset=Noisy(), sampler=dict(type=sampler, shuffle=True), num_workers=0,
                  collate_fn=dict(type='default_collate'))
    train_cfg = {key: steps if key.startswith('max_') else value for key, value in loop['train_cfg'].items()}
    return Runner(
        dict(type=Regressor), str(work_dir), train_dataloader=loader, train_cfg=train_cfg, val_cfg=dict(),
        val_dataloader=dict(loader, dataset=Noisy(), sampler=dict(type='DefaultSampler', shuffle=False)),
        val_evaluator=Evaluator(Rising()),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.01)),
        param_scheduler=dict(type='CosineAnnealingLR', T_max=4, by_epoch=loop['by_epoch']),
        default_hooks=dict(checkpoint=dict(
            type='mminline.SafeCheckpointHook', interval=1, by_epoch=loop['by_epoch'], **options)),
        randomness=dict(seed=0), resume=resume, load_from=load_from and str(load_from), default_scope='mmengine',
        experiment_name=f'run-{next(experiment)}')


def train(work_dir, *args, **kwargs):
    runner = build(work_dir, *args, **kwargs)
    runner.train()
    return runner


@pytest.fixture(autouse=True)
def no_pause_between_epochs(monkeypatch):
    monkeypatch.setattr('mmengine.runner.loops.time.sleep', lambda seconds: None)


def files(folder):
    """Names and contents of checkpoints, of last_checkpoint and of anything temporary."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()
            if path.suffix in ('.pth', '.tmp') or path.name == 'last_checkpoint'}


def assert_same_run(first, second):
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    states = [runner.optim_wrapper.state_dict() for runner in (first, second)]
    assert states[0]['param_groups'] == states[1]['param_groups']  # with the learning rate
    for index, state in states[0]['state'].items():
        assert all(torch.equal(value, states[1]['state'][index][name]) for name, value in state.items())
    assert [s.state_dict() for s in first.param_schedulers] == [s.state_dict() for s in second.param_schedulers]


# ---- the run goes on as it would have ----------------------------------------------------------------
@pytest.mark.parametrize('loop, sampler', [
    (ITERATIONS, 'InfiniteSampler'), (ITERATIONS, 'DefaultSampler'), (EPOCHS, 'DefaultSampler')],
    ids=['infinite', 'iterations', 'epochs'])
def test_two_and_two_are_four(tmp_path, loop, sampler):
    whole = train(tmp_path / 'whole', loop=loop, sampler=sampler)
    half = tmp_path / 'whole' / ('iter_2.pth' if loop is ITERATIONS else 'epoch_2.pth')
    resumed = train(tmp_path / 'half', loop=loop, sampler=sampler, resume=True, load_from=half)

    assert_same_run(whole, resumed)
    seen, seen_again = (runner.train_dataloader.dataset.seen for runner in (whole, resumed))
    assert len(set(seen)) == 6
    skipped = 0 if loop is ITERATIONS else 12  # iterations are skipped by loading them, epochs are not
    assert seen_again == seen[skipped:]


def test_validation_draws_no_random_numbers_of_training(tmp_path):
    often = train(tmp_path / 'often')
    rarely = train(tmp_path / 'rarely', loop=dict(
        ITERATIONS, train_cfg=dict(ITERATIONS['train_cfg'], val_interval=4)))
    assert_same_run(often, rarely)


def test_random_state_is_plain_data(tmp_path):
    state = get_random_state()
    drawn = random.random(), np.random.rand(), torch.rand(2)
    torch.save(state, tmp_path / 'state.pth')
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        set_random_state(torch.load(tmp_path / 'state.pth', weights_only=True))
    finally:
        torch.serialization.add_safe_globals(registered)
    assert (random.random(), np.random.rand()) == drawn[:2]
    assert torch.equal(torch.rand(2), drawn[2])


def test_without_random_state_the_run_goes_on_and_says_so(tmp_path):
    train(tmp_path, 1)
    checkpoint = torch.load(tmp_path / 'iter_1.pth', weights_only=True)
    del checkpoint['meta']['random_state']
    torch.save(checkpoint, tmp_path / 'iter_1.pth')
    assert train(tmp_path, 2, resume=True).iter == 2
    logs = ''.join(path.read_text() for path in tmp_path.glob('*/*.log'))
    assert logs.count('The checkpoint has the random state of 0 processes and this run has 1') == 1


def test_weights_of_another_run_bring_no_random_state(tmp_path):
    first = train(tmp_path / 'first', 1)
    state = get_random_state()['torch']
    second = train(tmp_path / 'second', 1, load_from=tmp_path / 'first' / 'iter_1.pth')
    assert second.iter == first.iter
    assert torch.equal(get_random_state()['torch'], state)


# ---- nothing is lost ---------------------------------------------------------------------------------
def train_and_be_killed(work_dir, moment, resume):
    """Ends its own process with SIGKILL in the midst of saving iter_2.pth."""
    sync, replace = os.fsync, os.replace

    def die_halfway(descriptor):
        if os.readlink(f'/proc/self/fd/{descriptor}').endswith('.iter_2.pth.tmp'):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    def die_before_renaming(source, target):
        if (work_dir / 'last_checkpoint').exists() and Path(target).name == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    if moment == 'halfway':
        os.fsync = die_halfway
    else:
        os.replace = die_before_renaming
    train(work_dir, resume=resume, max_keep_ckpts=1)


def be_killed_three_times(work_dir):
    """Each run goes on from what the one before left; forks, since importing torch takes the longest."""
    torch.set_num_threads(1)
    for moment in ('halfway', 'iter_2.pth', 'last_checkpoint'):
        if not (child := os.fork()):
            train_and_be_killed(work_dir, moment, resume=moment != 'halfway')
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, moment
        last = (work_dir / 'last_checkpoint').read_text()
        assert last == str(work_dir / 'iter_1.pth')
        assert load_weights_file(last)['meta']['iter'] == 1


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='needs SIGKILL and /proc')
def test_killed_three_times_while_saving(tmp_path):
    work_dir = tmp_path / 'killed'
    code = ('import pathlib, sys, tests.test_checkpoint_hook as test; '
            'test.be_killed_three_times(pathlib.Path(sys.argv[1]))')
    done = subprocess.run([sys.executable, '-c', code, str(work_dir)], cwd=Path(__file__).parents[1],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # The last kill left iter_2.pth complete, though not named as the last one yet.
    assert files(work_dir).keys() == {'iter_1.pth', 'iter_2.pth', 'last_checkpoint', '.last_checkpoint.tmp'}

    resumed = train(work_dir, resume=True, max_keep_ckpts=1)
    assert files(work_dir).keys() == {'iter_4.pth', 'last_checkpoint'}
    assert_same_run(train(tmp_path / 'whole'), resumed)


FAULTS = dict(full=(os, 'fsync', errno.ENOSPC), read_only=(builtins, 'open', errno.EROFS),
              forbidden=(os, 'replace', errno.EACCES))


@pytest.mark.parametrize('fault', FAULTS)
def test_a_checkpoint_that_cannot_be_written(tmp_path, monkeypatch, fault):
    train(tmp_path, 1, max_keep_ckpts=1)
    before = files(tmp_path)
    owner, name, code = FAULTS[fault]
    function = getattr(owner, name)

    def fail(*args, **kwargs):
        if name == 'fsync' or str(args[0]).endswith('.tmp'):
            raise OSError(code, os.strerror(code))
        return function(*args, **kwargs)

    runner = build(tmp_path, 2, resume=True, max_keep_ckpts=1)
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(OSError, match=rf'could not write [0-9,]+ bytes, what was there before is kept: '
                                      rf'{os.strerror(code)}.*iter_2.pth') as error:
        runner.train()
    monkeypatch.undo()
    assert error.value.errno == code
    assert files(tmp_path) == before

    assert train(tmp_path, 2, resume=True, max_keep_ckpts=1).iter == 2
    assert files(tmp_path).keys() == {'iter_2.pth', 'last_checkpoint'}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / 'disk'
    folder.mkdir()
    mount = shutil.which('mount') or pytest.skip('there is no mount')
    done = subprocess.run([mount, '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f'this user may not mount: {done.stderr.strip()}')
    yield folder
    subprocess.run(['umount', folder], check=True)


def test_a_disk_that_is_full_and_then_read_only(tmp_path, small_disk):
    options = dict(max_keep_ckpts=1, out_dir=str(small_disk))
    train(tmp_path / 'run', 1, **options)
    before = files(small_disk / 'run')
    assert before.keys() == {'iter_1.pth'}
    free = os.statvfs(small_disk)
    (small_disk / 'other').write_bytes(bytes(free.f_bavail * free.f_bsize))

    with pytest.raises(OSError, match='could not write .*iter_2.pth') as full:
        train(tmp_path / 'run', 2, resume=True, **options)
    assert full.value.errno == errno.ENOSPC
    assert files(small_disk / 'run') == before

    (small_disk / 'other').unlink()
    subprocess.run(['mount', '-o', 'remount,ro', small_disk], check=True)
    with pytest.raises(OSError, match='could not write .*iter_2.pth') as read_only:
        train(tmp_path / 'run', 2, resume=True, **options)
    assert read_only.value.errno == errno.EROFS
    assert files(small_disk / 'run') == before

    subprocess.run(['mount', '-o', 'remount,rw', small_disk], check=True)
    assert train(tmp_path / 'run', 2, resume=True, **options).iter == 2
    assert files(small_disk / 'run').keys() == {'iter_2.pth'}


def test_outdated_checkpoints_are_removed_last(tmp_path, monkeypatch):
    train(tmp_path, 2, max_keep_ckpts=1, save_best='score', rule='greater')
    assert files(tmp_path).keys() == {'iter_2.pth', 'best_score_iter_2.pth', 'last_checkpoint'}
    events = []

    def recorded(function, event):
        def call(*args, **kwargs):
            events.append(f'{event} {Path(args[-1]).name}')
            return function(*args, **kwargs)
        return call

    monkeypatch.setattr(os, 'replace', recorded(os.replace, 'put'))
    monkeypatch.setattr(os, 'remove', recorded(os.remove, 'remove'))
    train(tmp_path, 3, resume=True, max_keep_ckpts=1, save_best='score', rule='greater')
    assert events == ['put iter_3.pth', 'put last_checkpoint', 'remove iter_2.pth', 'put best_score_iter_3.pth',
                      'put iter_3.pth', 'put last_checkpoint', 'remove best_score_iter_2.pth']


def test_what_a_kill_left_to_be_pruned_is_pruned_on_resume(tmp_path, monkeypatch):
    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, 'remove', killed)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 2, max_keep_ckpts=1)
    monkeypatch.undo()
    assert files(tmp_path).keys() == {'iter_1.pth', 'iter_2.pth', 'last_checkpoint'}
    train(tmp_path, 2, resume=True, max_keep_ckpts=1)
    assert files(tmp_path).keys() == {'iter_2.pth', 'last_checkpoint'}


def test_checkpoints_of_the_same_name_stay(tmp_path):
    train(tmp_path, 2, save_best='score', rule='greater', filename_tmpl='one.pth', max_keep_ckpts=1)
    assert files(tmp_path).keys() == {'one.pth', 'best_score_one.pth', 'last_checkpoint'}


@pytest.mark.parametrize('options, error, message', [
    (dict(max_keep_ckpt=1), TypeError, "has no option 'max_keep_ckpt'"),
    (dict(backend_args=dict(backend='petrel')), ValueError, 'writes to local folders only'),
    (dict(out_dir='s3://bucket'), ValueError, "got out_dir='s3://bucket'")])
def test_bad_options(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        build(tmp_path, **options)
