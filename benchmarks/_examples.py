"""The data and the model of the examples' folder. Imports flax."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from _data import load as load
from _models import ConvNet as ConvNet
