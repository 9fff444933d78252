"""python -m mminline.doctor: what it finds, in simulated and in really broken installations, and what it advises."""
import io
import os
import re
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mminline import doctor

ROOT = Path(__file__).parents[1]
TESTED = {'torch': '2.13.0+cpu', 'numpy': '2.4.6', 'setuptools': '80.9.0', 'mmengine': '0.10.7', 'mmcv': '2.1.0',
          'mmdet': '3.3.0', 'mmsegmentation': '1.2.2', 'triton': '3.9.0'}
ONEDL = {'torch': '2.13.0', 'numpy': '2.4.6', 'onedl-mmengine': '0.10.12', 'onedl-mmcv': '2.3.6',
         'onedl-mmdetection': '3.5.1', 'onedl-mmsegmentation': '1.4.2'}


@pytest.fixture
def diagnose(monkeypatch):
    """Diagnoses an installation of these versions, in which some modules raise when they are imported."""

    def diagnose_these(versions, broken=None):
        def version(name):
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        def import_these(name):
            if name in (broken or {}):
                raise broken[name]
            return import_module(name)

        monkeypatch.setattr(doctor.metadata, 'version', version)
        monkeypatch.setattr(doctor, 'import_module', import_these)
        findings = doctor.diagnose()
        return findings, {finding.name: finding for finding in findings}

    return diagnose_these


def wrong(findings):
    return {finding.name for finding in findings if finding.state == doctor.WRONG}


# ---- simulated installations ----------------------------------------------------------------------------
@pytest.mark.parametrize('versions', [TESTED, ONEDL], ids=['official', 'onedl'])
def test_good_sets(diagnose, versions):
    findings, _ = diagnose(versions)
    assert not wrong(findings) and doctor.is_healthy(findings)
    assert [name for name, missing in doctor.features(findings).items() if not missing][:3] == [
        'backbones', 'detection', 'segmentation']


WRONG_VERSIONS = {
    'torch': ('2.5.1', 'pip install "torch>=2.6"', ('backbones', 'detection', 'segmentation')),
    'setuptools': ('81.0.0', 'pip install "setuptools<81"', ('detection', 'segmentation')),
    'mmengine': ('0.7.0', 'pip install "mmengine>=0.10.7,<1"', ('backbones', 'detection', 'segmentation')),
    'mmcv': ('2.2.0', 'pip install --no-build-isolation --no-cache-dir "mmcv>=2.0.0rc4,<2.2"',
             ('backbones', 'detection', 'segmentation')),
    'mmdet': ('2.28.2', 'pip install "mmdet>=3.3,<4"', ('detection', )),
    'mmsegmentation': ('0.30.0', 'pip install "mmsegmentation>=1.2.2,<2"', ('segmentation', )),
}


@pytest.mark.parametrize('name', WRONG_VERSIONS)
def test_wrong_versions(diagnose, name):
    version, command, not_working = WRONG_VERSIONS[name]
    findings, by_name = diagnose({**TESTED, name: version})
    row = by_name['mmseg' if name == 'mmsegmentation' else name]
    assert row.state == doctor.WRONG and version in row.found and row.advice.endswith(command)
    assert wrong(findings) == {row.name} and not doctor.is_healthy(findings)
    for feature in ('backbones', 'detection', 'segmentation'):
        assert (row.name in doctor.features(findings)[feature]) == (feature in not_working)


@pytest.mark.parametrize('name, module', [('mmdet', 'mmdet'), ('mmsegmentation', 'mmseg')])
def test_one_toolbox_is_enough(diagnose, name, module):
    versions = {key: version for key, version in TESTED.items() if key != name}
    findings, by_name = diagnose(versions, {module: ModuleNotFoundError(f'No module named {module!r}', name=module)})
    assert by_name[module].state == doctor.ABSENT and f'not installed: pip install "{name}>=' in by_name[module].advice
    assert doctor.is_healthy(findings)


def test_no_mmcv(diagnose):
    missing = ModuleNotFoundError("No module named 'mmcv'", name='mmcv')
    versions = {key: version for key, version in TESTED.items() if key != 'mmcv'}
    findings, by_name = diagnose(versions, dict.fromkeys(('mmcv', 'mmcv.ops', 'mmdet', 'mmseg'), missing))
    assert by_name['mmcv'].state == by_name['mmcv.ops'].state == doctor.ABSENT
    assert 'does not import without mmcv' in by_name['mmdet'].advice
    assert not doctor.is_healthy(findings) and 'mmcv' in doctor.features(findings)['backbones']


def test_mmcv_lite_serves_the_backbones(diagnose):
    versions = {key: version for key, version in TESTED.items() if key != 'mmcv'}
    findings, by_name = diagnose({**versions, 'mmcv-lite': '2.1.0'})
    assert by_name['mmcv'].state == doctor.OK and by_name['mmcv.ops'].state == doctor.ABSENT
    assert not doctor.features(findings)['backbones'] and not doctor.is_healthy(findings)


@pytest.mark.parametrize('error', [
    ImportError('_ext.so: undefined symbol: _ZN3c104cuda'), ModuleNotFoundError("No module named 'mmcv._ext'",
                                                                                name='mmcv._ext')])
def test_ops_of_another_torch(diagnose, error):
    findings, by_name = diagnose(TESTED, {'mmcv.ops': error})
    assert wrong(findings) == {'mmcv.ops'}
    advice = by_name['mmcv.ops'].advice
    assert str(error) in advice and '--no-cache-dir --no-binary mmcv mmcv==2.1.0' in advice and 'make setup' in advice


def test_ops_that_do_not_run(diagnose, monkeypatch):
    import mmcv.ops

    def refuses(*args):
        raise RuntimeError('no implementation\nfor this device')

    monkeypatch.setattr(mmcv.ops, 'nms', refuses)
    _, by_name = diagnose(TESTED)
    assert by_name['mmcv.ops'].advice.startswith('nms does not run on cpu: no implementation for this device. ')


def test_two_packages_in_one_folder(diagnose):
    findings, by_name = diagnose({**TESTED, 'onedl-mmcv': '2.3.6'})
    assert wrong(findings) == {'mmcv'}
    assert by_name['mmcv'].found == 'mmcv 2.1.0, onedl-mmcv 2.3.6'
    assert 'pip uninstall mmcv onedl-mmcv' in by_name['mmcv'].advice


def test_a_dependency_is_missing(diagnose):
    findings, by_name = diagnose(TESTED, {'mmseg': ModuleNotFoundError("No module named 'ftfy'", name='ftfy')})
    assert wrong(findings) == {'mmseg'}
    assert by_name['mmseg'].advice == 'does not import without ftfy: pip install ftfy'


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_no_gpu_is_no_fault(diagnose):
    findings, by_name = diagnose(TESTED)
    assert by_name['GPU'].found.startswith('none') and doctor.features(findings)['GPU kernels'] == ['GPU', 'triton']
    assert doctor.is_healthy(findings)


@pytest.mark.parametrize('capability, problem, states', [
    ((9, 0), None, ('ok', 'ok')), ((7, 5), None, ('not used', 'ok')),
    ((9, 0), 'the kernels need Triton 3.6, got 3.1.0', ('ok', 'wrong'))])
def test_gpu(monkeypatch, capability, problem, states):
    from mminline.ops import functional
    monkeypatch.setattr(functional, 'gpu_problem', lambda: problem)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda: capability)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda: 'Some GPU')
    monkeypatch.setattr(torch.cuda, 'get_device_properties',
                        lambda index: type('Properties', (), dict(total_memory=80 * 2**30)))
    gpu, triton = doctor._gpu()
    assert (gpu.state, triton.state) == states
    assert gpu.found == f'Some GPU, capability {capability[0]}.{capability[1]}, 80 GiB'
    assert problem is None or problem in triton.advice


def test_report(diagnose):
    findings, _ = diagnose({**TESTED, 'setuptools': '82.0.1'})
    output = io.StringIO()
    doctor.report(findings, Console(file=output, width=60))
    text = output.getvalue()
    assert re.search(r'setuptools +│ 82\.0\.1 +│ wrong', text)
    assert re.search(r'backbones +│ yes', text) and re.search(r'detection +│ no +│ setuptools', text)
    assert 'which setuptools 81 removed: pip install "setuptools<81"\n' in text  # on one line, to be copied
    for name, version in {**TESTED, **ONEDL}.items():
        if name != 'triton' and not name.startswith(('torch', 'setuptools')):
            assert f'{name}=={version}' in text


# ---- real ones ------------------------------------------------------------------------------------------
def run_doctor(*args, path=''):
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=ROOT, env={
        **os.environ, 'PYTHONPATH': str(path), 'COLUMNS': '100', 'OMP_NUM_THREADS': '1'})


def test_this_installation():
    """The tests need a working one."""
    result = run_doctor('-m', 'mminline.doctor')
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(rf'torch +│ torch {re.escape(torch.__version__)} +│ ok', result.stdout)
    assert re.search(r'mmcv\.ops +│ run on this torch.*│ ok', result.stdout)


def test_packages_that_break_on_import(tmp_path):
    (tmp_path / 'mmdet.py').write_text('assert False, "MMCV==9 is used but incompatible"')
    (tmp_path / 'mmcv').mkdir()
    (tmp_path / 'mmcv/__init__.py').write_text('')
    (tmp_path / 'mmcv/ops.py').write_text('raise ImportError("undefined symbol: abc")')
    result = run_doctor('-m', 'mminline.doctor', path=tmp_path)
    assert result.returncode == 1 and 'Traceback' not in result.stderr
    assert '- mmdet: does not import: MMCV==9 is used but incompatible' in result.stdout
    assert '- mmcv.ops: does not import: undefined symbol: abc. ' in result.stdout


def test_as_a_file_where_mminline_cannot_be_imported(tmp_path):
    (tmp_path / 'mmengine.py').write_text('raise RuntimeError("half of it")')
    result = run_doctor('mminline/doctor.py', path=tmp_path)
    assert result.returncode == 1 and 'Traceback' not in result.stderr
    assert '- mmengine: does not import: half of it' in result.stdout


def test_unknown_argument(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['doctor', '--fix'])
    with pytest.raises(SystemExit) as end:
        doctor.main()
    assert end.value.code == 2 and 'unrecognized arguments: --fix' in capsys.readouterr().err
