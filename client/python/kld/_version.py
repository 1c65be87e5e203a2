"""The version, from the file that setup.py puts beside this one, or from the tree it lies in."""
import pathlib

_HERE = pathlib.Path(__file__).resolve().parent
_FILE = _HERE / "VERSION"
__version__: str = (_FILE if _FILE.exists() else _HERE.parents[2] / "proto" / "VERSION").read_text().strip()
