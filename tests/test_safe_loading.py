"""Checkpoints of runs and official files load with weights_only=True; crafted ones are refused."""
import ast
import builtins
import copy
import functools
import http.server
import io
import os
import pickle
import random
import re
import subprocess
import sys
import threading
import types
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.logging import HistoryBuffer
from mmengine.model import BaseModel
from mmengine.runner import Runner
from mmengine.runner.checkpoint import _load_checkpoint
from torch import nn

from mminline.datasets import make_shapes
from mminline.preflight import RunError
from mminline.safe_loading import allow_run_checkpoints, load_weights_file

from .test_bad_input import READERS, config_of_a_run
from .test_infer import make_model

# The functions by which numpy pickles arrays and numbers; their module depends on numpy's version.
RECONSTRUCT, SCALAR = np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]


@pytest.fixture(autouse=True)
def restricted_unpickler():
    """Each test starts with this project's registrations alone and leaves what it found."""
    found = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    allow_run_checkpoints()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(found)


# ---- checkpoints of a run ----------------------------------------------------------------------------


class Regressor(BaseModel):

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, inputs, targets, mode='tensor'):
        outputs = self.linear(inputs)
        if mode == 'loss':
            return dict(loss=nn.functional.mse_loss(outputs, targets))
        return list(outputs)


class Score(BaseMetric):
    """A numpy number, as many metrics are."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def process(self, data_batch, data_samples):
        self.results.append(self.value)

    def compute_metrics(self, results):
        return dict(score=np.float32(results[0]))


def train(work_dir, iterations, resume=False, score=0.5):
    """Trains a linear layer with what puts more than tensors into a checkpoint; returns the runner."""
    data = [dict(inputs=torch.full((3,), float(i)), targets=torch.tensor([float(i)])) for i in range(4)]
    loader = dict(batch_size=2, dataset=data, sampler=dict(type='DefaultSampler', shuffle=False),
                  collate_fn=dict(type='default_collate'))
    runner = Runner(
        Regressor(), str(work_dir), train_dataloader=loader, val_dataloader=loader,
        train_cfg=dict(type='IterBasedTrainLoop', max_iters=iterations, val_interval=1), val_cfg=dict(),
        val_evaluator=Evaluator(Score(score)), optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.01)),
        param_scheduler=[dict(type='LinearLR', start_factor=0.1, end=2, by_epoch=False),
                         dict(type='MultiStepLR', milestones=[3], by_epoch=False)],
        default_hooks=dict(logger=dict(type='LoggerHook', interval=1),
                           checkpoint=dict(type='CheckpointHook', interval=1, by_epoch=False,
                                           save_best='score', rule='greater')),
        custom_hooks=[dict(type='EMAHook')], resume=resume, randomness=dict(seed=0),
        default_scope='mmengine', experiment_name=f'{work_dir.name}-{iterations}-{random.random()}')
    runner.train()
    return runner


def test_a_run_resumes_with_its_histories(tmp_path, monkeypatch):
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')  # must not matter
    first = train(tmp_path, iterations=2)
    first_losses = first.message_hub.get_scalar('train/loss').data[0]

    saved = load_weights_file(tmp_path / 'iter_2.pth')
    history = saved['message_hub']['log_scalars']['train/loss']
    assert type(history) is HistoryBuffer
    assert history.max_length == 1000000
    assert history.current() == history.statistics('current') == first_losses[-1]
    assert history.mean() == history.statistics('mean') == pytest.approx(first_losses.mean())
    assert saved['message_hub']['runtime_info']['best_score'] == 0.5
    assert {'optimizer', 'param_schedulers', 'ema_state_dict'} <= saved.keys()

    resumed = train(tmp_path, iterations=4, resume=True, score=0.25)
    losses, counts = resumed.message_hub.get_scalar('train/loss').data
    assert len(losses) == len(counts) == 4
    np.testing.assert_array_equal(losses[:2], first_losses)
    assert resumed.message_hub.get_info('best_score') == 0.5
    assert type(losses) is np.ndarray

    # What was resumed is saved again as what it is, by the class of mmengine.
    again = torch.load(tmp_path / 'iter_4.pth', weights_only=True)
    np.testing.assert_array_equal(again['message_hub']['log_scalars']['train/loss'].data[0], losses)


def test_histories_keep_their_length_limit(tmp_path):
    history = HistoryBuffer([1., 2., 3.], [1, 1, 2], max_length=3)
    torch.save(history, tmp_path / 'history.pth')
    loaded = load_weights_file(tmp_path / 'history.pth')
    loaded.update(9.)
    assert loaded.max_length == 3
    np.testing.assert_array_equal(loaded.data, [[2., 3., 9.], [1, 2, 1]])
    np.testing.assert_array_equal(copy.deepcopy(loaded).data, loaded.data)


@pytest.mark.parametrize('module', ['numpy._core.multiarray', 'numpy.core.multiarray'])
def test_numpy_arrays_and_numbers(tmp_path, module):
    """numpy 2 and numpy 1 write different module names."""
    saved = dict(
        random_state=np.random.RandomState(3).get_state(),
        arrays=[np.arange(24).reshape(2, 3, 4).astype(dtype) for dtype in
                ('bool', 'int8', 'uint8', 'int16', 'int64', 'float16', 'float32', '<f8', '>f8', '>i4')],
        fortran=np.asfortranarray(np.random.RandomState(0).rand(3, 40, 5)),
        scalar=np.array(2.5),
        numbers=[np.float64(0.1), np.float32(0.1), np.int64(-3), np.uint8(7), np.bool_(True)])
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    here = RECONSTRUCT.__module__
    write_pickle(tmp_path / 'numpy.pth', read_pickle(buffer).replace(f'c{here}\n'.encode(),
                                                                     f'c{module}\n'.encode()))
    loaded = load_weights_file(tmp_path / 'numpy.pth')

    for array, expected in zip(loaded['arrays'], saved['arrays']):
        assert isinstance(array, np.ndarray)
        assert array.dtype == expected.dtype.newbyteorder('=')  # numpy swaps the bytes, as always
        np.testing.assert_array_equal(array, expected)
    np.testing.assert_array_equal(loaded['fortran'], saved['fortran'])
    np.testing.assert_array_equal(loaded['scalar'], saved['scalar'])
    for number, expected in zip(loaded['numbers'], saved['numbers']):
        assert type(number) is type(expected) and number == expected
    resumed = np.random.RandomState()
    resumed.set_state(loaded['random_state'])
    assert resumed.rand() == np.random.RandomState(3).rand()
    assert pickle.dumps(loaded['fortran']) == pickle.dumps(saved['fortran'])  # saved again as a plain array


# ---- official files ----------------------------------------------------------------------------------


@pytest.fixture
def cfg_node(monkeypatch):
    """A class as yacs' CfgNode, pickled under its name; yacs itself is not needed."""
    module = types.ModuleType('yacs.config')

    class CfgNode(dict):

        def __init__(self, content):
            super().__init__(content)
            self.__dict__['__immutable__'] = True
            self.__dict__['__deprecated_keys__'] = set()

    CfgNode.__module__, CfgNode.__qualname__ = 'yacs.config', 'CfgNode'
    module.CfgNode = CfgNode
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, 'yacs', types.ModuleType('yacs'))
        patch.setitem(sys.modules, 'yacs.config', module)
        yield CfgNode


def test_official_files_load_without_yacs(tmp_path, cfg_node, monkeypatch):
    path = tmp_path / 'official.pth'
    config = cfg_node(dict(MODEL=cfg_node(dict(NAME='inline_pvt_tiny', DEPTHS=[2, 2])), BASE=['']))
    weights = OrderedDict(weight=torch.ones(2))
    torch.save(dict(model=weights, config=config, max_accuracy=78.2, epoch=300), path)
    monkeypatch.setitem(sys.modules, 'yacs', None)
    monkeypatch.setitem(sys.modules, 'yacs.config', None)

    for loaded in (load_weights_file(path), _load_checkpoint(str(path), map_location='cpu')):
        assert torch.equal(loaded['model']['weight'], torch.ones(2))
        assert type(loaded['config']) is OrderedDict
        assert loaded['config']['MODEL']['NAME'] == 'inline_pvt_tiny'


# ---- crafted files -----------------------------------------------------------------------------------


class Call:
    """Is pickled as ``function(*args)``, then given a state and items."""

    def __init__(self, function, *args, state=None, items=None):
        self.function, self.args, self.state, self.items = function, args, state, items or {}

    def __reduce__(self):
        return self.function, self.args, self.state, None, iter(self.items.items())


def read_pickle(checkpoint):
    with zipfile.ZipFile(checkpoint) as file:
        return next(file.read(name) for name in file.namelist() if name.endswith('/data.pkl'))


def write_pickle(path, data):
    with zipfile.ZipFile(path, 'w') as file:
        file.writestr('checkpoint/data.pkl', data)
        file.writestr('checkpoint/version', '3\n')


def array_of(dtype, shape=(2,), data=b'A' * 16):
    """A numpy array as numpy saves one, of any type and data."""
    return Call(RECONSTRUCT, np.ndarray, (0,), b'b', state=(1, shape, dtype, False, data))


def dtype_changed_to(*state):
    return Call(np.dtype, 'f8', False, True, state=state)


def history_of(logs, counts, max_length=10):
    return Call(HistoryBuffer, state=dict(_log_history=logs, _count_history=counts, max_length=max_length))


HISTORY_INIT = Call(getattr, HistoryBuffer, '__init__')
CHANGES_BUILTINS = Call(getattr, HISTORY_INIT, '__builtins__', items=dict(crafted=1))
# What is in the file and what the error has to name. Those that run code would make the file 'code_ran'.
CRAFTED = dict(
    os_system=(Call(os.system, 'touch code_ran'), 'system'),
    subprocess=(Call(subprocess.call, ['touch', 'code_ran']), '.call'),
    eval=(Call(eval, 'open("code_ran", "w")'), 'eval'),
    among_weights=(dict(state_dict=[Call(os.system, 'touch code_ran')]), 'system'),
    in_a_config=(dict(model={}, config=Call(exec, 'open("code_ran", "w")')), 'exec'),
    setattr=(Call(setattr, HistoryBuffer, 'mean', len), 'setattr'),
    import_module=(Call(__import__, 'os'), '__import__'),
    getattr_to_globals=(Call(getattr, HISTORY_INIT, '__globals__'), '__globals__'),
    getattr_to_builtins=(CHANGES_BUILTINS, '__builtins__'),
    getattr_of_torch=(Call(getattr, torch.Tensor, '__class__'), '__class__'),
    history_of_a_list=(history_of([1.], [1]), '1-d numeric array'),
    history_of_a_matrix=(history_of(np.ones((2, 2)), np.ones(2)), '1-d numeric array'),
    history_uneven=(history_of(np.ones(2), np.ones(3)), '2 values, 3 counts'),
    history_too_long=(history_of(np.ones(2), np.ones(2), max_length=1), 'maximum length 1'),
    history_of_text_length=(history_of(np.ones(2), np.ones(2), max_length='3'), "maximum length '3'"),
    history_without_arrays=(Call(HistoryBuffer, state=dict(max_length=10)), 'lacks'),
    history_without_state=(Call(HistoryBuffer, state='mean'), 'lacks'),
    history_with_functions=(Call(HistoryBuffer, state=dict(statistics_methods=dict(mean=len))), 'len'),
    array_of_pointers=(array_of(np.dtype('O')), "'O8'"),
    array_of_records=(array_of(np.dtype([('a', 'O')])), "'V8'"),
    array_of_changed_type=(array_of(dtype_changed_to(3, '<', (np.dtype('f8'), (1,)), None, None, 8, 1, 0)),
                           'changes the numpy type'),
    array_of_changed_flags=(array_of(dtype_changed_to(3, '<', None, None, None, -1, -1, 63)),
                            'changes the numpy type'),
    array_too_large=(array_of(np.dtype('f8'), shape=(1 << 40,)), 'do not fit'),
    array_negative=(array_of(np.dtype('f8'), shape=(-1, -2)), 'do not fit'),
    array_of_text=(array_of(np.dtype('f8'), data='A' * 16), 'do not fit'),
    array_as_a_view=(Call(np.ndarray, (2,), 'f8', b'A' * 16), 'other means'),
    number_of_pointers=(Call(SCALAR, np.dtype('O'), b'A' * 8), "'O8'"),
    number_too_short=(Call(SCALAR, np.dtype('f8'), b'A'), 'do not fit'),
)


@pytest.mark.parametrize('name', CRAFTED)
@pytest.mark.parametrize('read', [load_weights_file, _load_checkpoint, functools.partial(
    torch.load, weights_only=True)], ids=['load_weights_file', 'mmengine', 'torch'])
def test_crafted_files_are_refused_and_leave_no_trace(tmp_path, monkeypatch, name, read):
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')  # must not matter
    monkeypatch.chdir(tmp_path)
    HistoryBuffer()  # fills the class-wide table
    methods, members = dict(HistoryBuffer._statistics_methods), dict(vars(HistoryBuffer))
    names = dict(vars(builtins))
    content, what = CRAFTED[name]
    torch.save(content, 'crafted.pth')

    with pytest.raises(pickle.UnpicklingError) as caught:
        read('crafted.pth')
    assert what in str(caught.value)
    if read is load_weights_file:
        assert str(caught.value).startswith('crafted.pth was not loaded, for safety: ')
        assert 'weights_only=False' not in str(caught.value)
    assert os.listdir() == ['crafted.pth']
    assert HistoryBuffer._statistics_methods == methods and dict(vars(HistoryBuffer)) == members
    assert dict(vars(builtins)) == names
    assert np.dtype('f8').isnative and np.zeros(2).tolist() == [0, 0]


def test_a_history_cannot_change_the_table_of_statistics(tmp_path):
    """An allowed function in the table loads, but the table stays as it is."""
    HistoryBuffer()
    methods = dict(HistoryBuffer._statistics_methods)
    state = dict(_log_history=np.ones(2), _count_history=np.ones(2), max_length=10, update=Counter,
                 statistics_methods=dict(mean=Counter, more=Counter))
    torch.save(Call(HistoryBuffer, state=state), tmp_path / 'history.pth')
    loaded = load_weights_file(tmp_path / 'history.pth')
    assert HistoryBuffer._statistics_methods == methods
    assert loaded.statistics('mean') == 1
    assert set(vars(loaded)) == {'_log_history', '_count_history', 'max_length'}


def test_an_array_is_filled_once(tmp_path):
    """A second filling would free memory that a tensor made from the array still uses."""
    torch.save(np.arange(300.), tmp_path / 'array.pth')
    data = read_pickle(tmp_path / 'array.pth')
    # The pickle ends with the state, BUILD and STOP: keep the state in slot 200, build, build again.
    assert data.endswith(b'b.')
    write_pickle(tmp_path / 'twice.pth', data[:-2] + b'q\xc8bh\xc8b.')
    with pytest.raises(pickle.UnpicklingError, match='fills a numpy array twice'):
        load_weights_file(tmp_path / 'twice.pth')


def test_names_registered_by_others_do_not_open_the_door(tmp_path):
    """The real names, which are widely advised for mmengine's checkpoints, give way to the stand-ins."""
    class Own:
        pass

    torch.serialization.add_safe_globals([getattr, HistoryBuffer, np.ndarray, np.dtype, Own])
    torch.save(CHANGES_BUILTINS, tmp_path / 'crafted.pth')
    with pytest.raises(pickle.UnpicklingError, match='__builtins__'):
        load_weights_file(tmp_path / 'crafted.pth')
    assert not hasattr(builtins, 'crafted')
    registered = torch.serialization.get_safe_globals()
    assert Own in registered and getattr not in registered and HistoryBuffer not in registered


def test_registering_again_changes_nothing():
    before = set(torch.serialization.get_safe_globals())
    allow_run_checkpoints()
    assert set(torch.serialization.get_safe_globals()) == before


def test_resume_does_not_run_a_config_in_the_checkpoint(tmp_path):
    """mmengine's resume runs the text of ``meta['config']`` as Python."""
    train(tmp_path, iterations=2)
    checkpoint = torch.load(tmp_path / 'iter_2.pth', weights_only=True)
    checkpoint['meta']['config'] = f'open({str(tmp_path / "code_ran")!r}, "w")'
    torch.save(checkpoint, tmp_path / 'iter_2.pth')
    resumed = train(tmp_path, iterations=3, resume=True)
    assert resumed.iter == 3
    assert not (tmp_path / 'code_ran').exists()


@pytest.fixture(scope='module')
def detector(tmp_path_factory):
    folder = tmp_path_factory.mktemp('detector')
    make_shapes(folder / 'shapes', num_images=4)
    return make_model(folder, 'detection'), folder / 'shapes/coco'


@pytest.mark.parametrize('reader', READERS)
def test_no_reader_runs_what_is_in_a_file(detector, tmp_path, monkeypatch, reader):
    """The whole way of each: what is in the file never becomes a model, and leaves no trace."""
    model, data_root = detector
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')  # must not matter
    content = torch.load(model.checkpoint, weights_only=True)
    content['state_dict']['backbone.pos_embed1'] = Call(os.system, f'touch {tmp_path / "code_ran"}')
    torch.save(content, tmp_path / 'crafted.pth')
    cfg = config_of_a_run(model, data_root, tmp_path)
    with pytest.raises((pickle.UnpicklingError, RunError), match=r'crafted\.pth was not loaded, for safety: .*system'):
        READERS[reader](cfg, tmp_path / 'crafted.pth', data_root / 'train/000001.jpg', tmp_path / 'out')
    assert {path.name for path in tmp_path.iterdir()} <= {'crafted.pth', 'run'}
    assert not list(tmp_path.glob('run/*.pth'))


# As a loader that is there before this project is imported, such as that of onedl's mmengine.
TRUSTING_LOADER = """
import os, pickle, sys
import torch
from mmengine.runner.checkpoint import CheckpointLoader, load_checkpoint

@CheckpointLoader.register_scheme(prefixes='', force=True)
def load_from_local(filename, map_location=None):
    try:
        return torch.load(filename, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError:
        return torch.load(filename, map_location=map_location, weights_only=False)

load_checkpoint(torch.nn.Linear(1, 1), 'crafted.pth')
os.remove('code_ran')  # the file does what it is meant to do
import mminline
try:
    load_checkpoint(torch.nn.Linear(1, 1), 'crafted.pth')
except pickle.UnpicklingError as error:
    sys.exit(str(error))
"""


def test_a_loader_that_was_there_before_gives_way(tmp_path):
    torch.save(dict(state_dict=dict(weight=Call(os.system, 'touch code_ran'))), tmp_path / 'crafted.pth')
    result = subprocess.run([sys.executable, '-c', TRUSTING_LOADER], cwd=tmp_path, capture_output=True, text=True)
    assert re.search(r'crafted\.pth was not loaded, for safety: .*system', result.stderr), result.stderr
    assert os.listdir(tmp_path) == ['crafted.pth']


def test_downloads_are_read_the_same_way(tmp_path, monkeypatch):
    torch.save(dict(weight=torch.ones(2)), tmp_path / 'good.pth')
    torch.save(Call(os.system, f'touch {tmp_path / "code_ran"}'), tmp_path / 'crafted.pth')
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'cache'))

    class Handler(http.server.SimpleHTTPRequestHandler):

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Handler, directory=tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f'http://127.0.0.1:{server.server_port}'
        assert torch.equal(load_weights_file(f'{url}/good.pth')['weight'], torch.ones(2))
        with pytest.raises(pickle.UnpicklingError, match=r'crafted\.pth was not loaded, for safety.*system'):
            load_weights_file(f'{url}/crafted.pth')
    finally:
        server.shutdown()
        server.server_close()
    assert not (tmp_path / 'code_ran').exists()


# ---- the source --------------------------------------------------------------------------------------
ROOT = Path(__file__).parents[1]
RUN_TEXT = ('eval', 'exec', 'compile', 'os.system', 'os.popen', 'subprocess.getoutput', 'subprocess.getstatusoutput',
            'pickle.load', 'pickle.loads', 'pickle.Unpickler')


def dangerous_calls(source):
    """Yields calls that run text or unpickle anything, with their line."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if (name in RUN_TEXT or options.get('shell', 'False') != 'False'
                or (re.fullmatch(r'torch\.(hub\.)?load\w*', name) and 'weights_only' not in options)
                or options.get('weights_only', 'True') != 'True'):
            yield f'{node.lineno}: {name}'


@pytest.mark.parametrize('call', [
    'eval(text)', 'os.system(text)', 'subprocess.run(text, shell=True)', 'subprocess.run(text, shell=is_shell)',
    'torch.load(path)', 'torch.load(path, weights_only=False)', 'torch.hub.load_state_dict_from_url(url)'])
def test_dangerous_calls_are_seen(call):
    assert list(dangerous_calls(f'x = {call}'))
    assert not list(dangerous_calls('model.eval(); subprocess.run([name]); torch.load(path, weights_only=True)'))


def test_no_text_is_run():
    folders = ('mminline', 'tools', 'benchmarks', 'examples')
    paths = [path for folder in folders for path in (ROOT / folder).rglob('*.py')]
    assert len(paths) > 50
    found = [f'{path.relative_to(ROOT)}:{call}' for path in paths for call in dangerous_calls(path.read_text())]
    assert found == []


def test_scripts_hand_on_their_arguments_as_they_are():
    paths = [path for folder in ('tools', 'benchmarks') for path in (ROOT / folder).glob('*.sh')]
    assert len(paths) > 3
    for path in paths:
        script = path.read_text()
        assert not re.search(r'\b(eval|(ba)?sh -c)\b', script), path
        assert '$@' not in script.replace('"$@"', ''), path


# ---- unreadable files --------------------------------------------------------------------------------


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'no checkpoint file .*missing\.pth'):
        load_weights_file(tmp_path / 'missing.pth')


@pytest.mark.parametrize('zipped', [True, False], ids=['zip', 'legacy'])
@pytest.mark.parametrize('kept', [0., 0.001, 0.1, 0.5, 0.99])
def test_truncated_file_is_said_to_be_damaged(tmp_path, kept, zipped):
    path = tmp_path / 'truncated.pth'
    torch.save(dict(state_dict=dict(weight=torch.ones(64, 64))), path, _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    path.write_bytes(content[:int(len(content) * kept)])
    with pytest.raises(RuntimeError, match=r'truncated\.pth .*damaged or incomplete'):
        load_weights_file(path)


@pytest.mark.parametrize('content', [b'<html>404 Not Found</html>', b'version 1\noid sha256:0\nsize 9\n'])
def test_other_content_is_said_to_be_damaged(tmp_path, content):
    (tmp_path / 'page.pth').write_bytes(content)
    with pytest.raises(RuntimeError, match='damaged or incomplete'):
        load_weights_file(tmp_path / 'page.pth')
