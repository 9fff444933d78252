"""What is installed, whether it fits together, what works with it, and what to change: ``python -m mminline.doctor``.

Where mminline itself cannot be imported (torch or mmengine is missing or broken), run the file:
``python mminline/doctor.py``.

Exit status: 0 if all that is installed works and one toolbox is there; 1 otherwise.
"""
import argparse
import platform
import sys
import warnings
from importlib import import_module, metadata
from typing import NamedTuple, Optional

from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table

OK, ABSENT, UNUSED, WRONG = 'ok', 'not there', 'not used', 'wrong'
COLOURS = {OK: 'green', ABSENT: 'yellow', UNUSED: 'yellow', WRONG: 'red'}


class Package(NamedTuple):
    """A package, by the distributions that install it."""

    module: str  # what is imported
    distributions: dict[str, str]  # name: accepted versions; the official one first
    flags: str = ''  # for pip install


class Finding(NamedTuple):
    """One thing that was looked at."""

    name: str
    found: str  # version, or what there is
    state: str  # OK, ABSENT, UNUSED or WRONG
    advice: str = ''  # what is the matter, and what to do


# The bounds of this project, and those that the toolboxes assert when they are imported.
TORCH = Package('torch', {'torch': '>=2.6'})
NUMPY = Package('numpy', {'numpy': ''})
MMENGINE = Package(
    'mmengine', {'mmengine': '>=0.10.7,<1', 'mmengine-lite': '>=0.10.7,<1', 'onedl-mmengine': '>=0.10.8'})
# mmcv is compiled for the torch that is there, and pip's cache does not tell one torch from another.
MMCV = Package(
    'mmcv', {'mmcv': '>=2.0.0rc4,<2.2', 'mmcv-lite': '>=2.0.0rc4,<2.2', 'onedl-mmcv': '>=2.3'},
    flags='--no-build-isolation --no-cache-dir ')
MMDET = Package('mmdet', {'mmdet': '>=3.3,<4', 'onedl-mmdetection': '>=3.4,<4'})
MMSEG = Package('mmseg', {'mmsegmentation': '>=1.2.2,<2', 'onedl-mmsegmentation': '>=1.3,<2'})
SETUPTOOLS = '<81'
PYTHON = '>=3.9'

TOOLBOXES = ('detection', 'segmentation')
FEATURES = {
    'backbones': ('python', 'torch', 'numpy', 'mmengine', 'mmcv'),
    'detection': ('python', 'torch', 'numpy', 'setuptools', 'mmengine', 'mmcv', 'mmcv.ops', 'mmdet'),
    'segmentation': ('python', 'torch', 'numpy', 'setuptools', 'mmengine', 'mmcv', 'mmcv.ops', 'mmseg'),
    'GPU kernels': ('torch', 'GPU', 'triton'),
}

# Both install under the same import names: one or the other, never a mixture.
GOOD_SETS = {
    'official packages; this project is tested with them (CPU, Python 3.11)':
        'torch==2.13.0 numpy==2.4.6 setuptools==80.9.0 mmengine==0.10.7 mmcv==2.1.0 mmdet==3.3.0 '
        'mmsegmentation==1.2.2',
    'onedl packages, maintained, as their makers publish them (Python 3.10 or newer); not tested with this project':
        'onedl-mmengine==0.10.12 onedl-mmcv==2.3.6 onedl-mmdetection==3.5.1 onedl-mmsegmentation==1.4.2',
}


# ---- looking ------------------------------------------------------------------------------------------
def diagnose() -> list[Finding]:
    """Look at everything, and import it."""
    return [
        _python(), _package(TORCH), _package(NUMPY), _setuptools(), _package(MMENGINE), _package(MMCV), _compiled_ops(),
        _package(MMDET), _package(MMSEG), *_gpu()]


def features(findings: list[Finding]) -> dict[str, list[str]]:
    """For each feature, the names of what keeps it from working; an empty list if it works."""
    states = {finding.name: finding.state for finding in findings}
    return {feature: [name for name in needed if states[name] != OK] for feature, needed in FEATURES.items()}


def is_healthy(findings: list[Finding]) -> bool:
    """Whether all that is installed works, and there is a toolbox."""
    missing = features(findings)
    return all(finding.state != WRONG for finding in findings) and any(not missing[name] for name in TOOLBOXES)


def installed(distributions: dict[str, str]) -> dict[str, str]:
    """The versions of those distributions that are installed."""
    versions = {}
    for name in distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _python() -> Finding:
    version = platform.python_version()
    if version not in SpecifierSet(PYTHON):
        return Finding('python', version, WRONG, f'Python {PYTHON} is needed')
    return Finding('python', version, OK)


def _package(package: Package) -> Finding:
    name = package.module
    official, accepted = next(iter(package.distributions.items()))
    versions = installed(package.distributions)
    problem = import_problem(name)
    if not versions:
        if problem is None:  # such as a source folder on PYTHONPATH
            return Finding(name, 'of unknown version', OK)
        return Finding(name, 'none', ABSENT, f'not installed: pip install {package.flags}"{official}{accepted}"')
    found = ', '.join(f'{distribution} {version}' for distribution, version in versions.items())
    if len(versions) > 1:
        names = ' '.join(versions)
        return Finding(name, found, WRONG, f'these overwrite each other: pip uninstall {names}, then install one again')
    [(distribution, version)] = versions.items()
    accepted = package.distributions[distribution]
    if not SpecifierSet(accepted).contains(version, prereleases=True):
        return Finding(
            name, found, WRONG, f'another version is needed: pip install {package.flags}"{distribution}{accepted}"')
    if problem is not None:
        return Finding(name, found, WRONG, problem)
    return Finding(name, found, OK)


def _setuptools() -> Finding:
    versions = installed({'setuptools': ''})
    found = versions.get('setuptools', 'none')
    if installed({'onedl-mmengine': ''}):
        return Finding('setuptools', found, OK)  # it does without
    reason = 'mmengine finds mmdet:: and mmseg:: configs with pkg_resources, which setuptools 81 removed'
    if not versions or not SpecifierSet(SETUPTOOLS).contains(found, prereleases=True):
        return Finding('setuptools', found, WRONG, f'{reason}: pip install "setuptools{SETUPTOOLS}"')
    return Finding('setuptools', found, OK)


def _compiled_ops() -> Finding:
    name = 'mmcv.ops'
    versions = installed(MMCV.distributions)
    if set(versions) == {'mmcv-lite'}:
        return Finding(name, 'none', ABSENT, 'mmcv-lite has none, backbones need none; for the toolboxes: '
                                             'pip uninstall mmcv-lite, then install mmcv')
    if import_problem('mmcv') is not None:
        return Finding(name, 'none', ABSENT, 'they come with mmcv')
    problem = import_problem(name) or _ops_problem()
    if problem is not None:
        distribution, version = next(iter(versions.items()), ('mmcv', '2.1.0'))
        return Finding(name, 'broken', WRONG, (
            f'{problem}. Compiled ops fit one torch only; to compile them for this one: pip install --no-deps '
            f'--force-reinstall {MMCV.flags}--no-binary {distribution} {distribution}=={version} (in a clone of this '
            'project: make setup)'))
    cuda = import_module(name).get_compiling_cuda_version()
    return Finding(name, f'run on this torch; CUDA they were compiled with: {cuda}', OK)


def _ops_problem() -> Optional[str]:
    """Run a compiled op on the CPU, and on the GPU if there is one."""
    import torch
    nms = import_module('mmcv.ops').nms
    boxes, scores = torch.tensor([[0., 0., 2., 2.], [0., 0., 2., 2.]]), torch.tensor([0.9, 0.8])
    for device in ('cpu', 'cuda') if torch.cuda.is_available() else ('cpu', ):
        try:
            nms(boxes.to(device), scores.to(device), 0.5)
        except Exception as error:  # whatever it is, the op does not work
            return f'nms does not run on {device}: {_one_line(error)}'
    return None


def _gpu() -> list[Finding]:
    """The GPU and Triton; without a GPU the latter is not needed."""
    triton = installed({'triton': ''}).get('triton', 'none')
    try:
        import torch

        from mminline.ops.functional import gpu_problem
        problem = gpu_problem()
    except Exception as error:  # a broken torch, or whatever keeps mminline from being imported
        return [Finding('GPU', 'unknown', ABSENT, f'cannot be looked at: {_one_line(error)}'),
                Finding('triton', triton, UNUSED)]
    if not torch.cuda.is_available():
        reason = 'this torch is built for the CPU' if torch.version.cuda is None else 'no driver or no GPU'
        return [Finding('GPU', f'none ({reason})', ABSENT, 'attention runs on plain PyTorch, without the GPU kernels'),
                Finding('triton', triton, UNUSED)]
    capability = torch.cuda.get_device_capability()
    memory = torch.cuda.get_device_properties(0).total_memory / 2 ** 30
    found = f'{torch.cuda.get_device_name()}, capability {capability[0]}.{capability[1]}, {memory:.0f} GiB'
    gpu = Finding('GPU', found, OK)
    if capability < (8, 0):
        gpu = Finding('GPU', found, UNUSED, 'the kernels need capability 8.0; attention runs on plain PyTorch')
    if problem is not None:
        return [gpu, Finding('triton', triton, WRONG, f'{problem}; attention runs on plain PyTorch, slower')]
    return [gpu, Finding('triton', triton, OK)]


def import_problem(module: str) -> Optional[str]:
    """Why a module cannot be imported, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition('.')[0]
        if missing != module.partition('.')[0]:
            return f'does not import without {missing}: pip install {missing}'
        return f'does not import: {_one_line(error)}'
    except Exception as error:  # the toolboxes assert versions; a broken package raises anything
        return f'does not import: {_one_line(error)}'
    return None


def _one_line(error: Exception) -> str:
    return ' '.join(str(error).split()) or type(error).__name__


# ---- telling ------------------------------------------------------------------------------------------
def report(findings: list[Finding], console: Console) -> None:
    """Print what was found, what works, and what to do."""
    table = Table(title='What is installed', title_justify='left')
    for column in ('', 'found', 'state'):
        table.add_column(column)
    for finding in findings:
        table.add_row(finding.name, finding.found, f'[{COLOURS[finding.state]}]{finding.state}')
    works = Table(title='What works', title_justify='left')
    for column in ('', 'works', 'keeps it from working'):
        works.add_column(column)
    for feature, missing in features(findings).items():
        works.add_row(feature, '[yellow]no' if missing else '[green]yes', ', '.join(missing))
    console.print(table, works)
    advice = [finding for finding in findings if finding.advice]
    if advice:
        console.print('\n[bold]What to know and what to change')
        for finding in advice:
            console.print(f'- {finding.name}: {finding.advice}', soft_wrap=True, markup=False, highlight=False)
    console.print('\n[bold]Versions that go together; install one set or the other, not parts of both')
    for name, packages in GOOD_SETS.items():
        console.print(f'- {name}:\n  {packages}', soft_wrap=True, markup=False, highlight=False)


def main() -> int:
    argparse.ArgumentParser(
        prog='python -m mminline.doctor', description='Say what is installed, what works, and what to change.',
        epilog='Exit status: 0 if all that is installed works and one toolbox is there; 1 otherwise.').parse_args()
    findings = diagnose()
    report(findings, Console())
    return 0 if is_healthy(findings) else 1


if __name__ == '__main__':
    sys.exit(main())
