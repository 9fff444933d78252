import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
version = re.search(r"__version__ = '(.+)'", (HERE / 'mminline' / 'version.py').read_text()).group(1)

# mmcv is not listed: the backbones run with mmcv or with mmcv-lite (no compiled ops), and pip cannot say
# "one of them". The toolboxes of the extras need mmcv with its ops, >= 2.0.0rc4 and < 2.2.0.
det = ['mmdet>=3.3.0,<4']
seg = ['mmsegmentation>=1.2.2,<2', 'ftfy', 'regex']
export = ['onnx', 'onnxscript', 'onnxruntime']  # onnxscript: torch.onnx.export(dynamo=True) needs it
test = ['pytest', 'pytest-xdist', 'pycocotools', 'ruff', 'tensorboard']

setup(
    name='mminline',
    version=version,
    description='InLine attention backbones for MMDetection and MMSegmentation',
    long_description=(HERE / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    packages=find_packages(include=['mminline', 'mminline.*']),
    python_requires='>=3.9',
    install_requires=['torch>=2.6', 'mmengine>=0.10.7', 'numpy', 'opencv-python', 'setuptools<81'],
    extras_require=dict(det=det, seg=seg, export=export, test=test, all=det + seg + export + test),
    classifiers=[
        'License :: OSI Approved :: Apache Software License',
        'Programming Language :: Python :: 3',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
)
