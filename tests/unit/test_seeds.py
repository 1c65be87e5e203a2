"""The seeds of the fuzz targets in tests/fuzz/corpus are those that tests/fuzz/seeds.py writes."""
import pathlib
import subprocess
import sys

FUZZ = pathlib.Path(__file__).resolve().parents[1] / "fuzz"


def read(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_corpus_is_what_the_script_writes(tmp_path):
    """But for crash-*, and the targets that it knows nothing of."""
    subprocess.run([sys.executable, "-B", FUZZ / "seeds.py", tmp_path], check=True)
    written = {folder.name: read(folder) for folder in tmp_path.iterdir()}
    assert len(written["worker"]) > 50 and len(written) > 5
    for target, seeds in written.items():
        there = {name: text for name, text in read(FUZZ / "corpus" / target).items() if not name.startswith("crash-")}
        assert there.keys() == seeds.keys(), f"{target}: {sorted(there.keys() ^ seeds.keys())}: run tests/fuzz/seeds.py"
        assert [name for name in seeds if seeds[name] != there[name]] == [], f"{target}: run tests/fuzz/seeds.py"
