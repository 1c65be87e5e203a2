"""What the scripts here are told: types for argparse, whose errors say what was expected, and what they need, which is
looked for before anything is measured. Imports nothing of the tests' nor of the package's."""
import argparse
import pathlib
import sys


def how_many(text):
    """How many, from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least 1")
    return int(text)


def how_long(text):
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, more than 0")
    return value


def setting(text):
    """A server's, as (NAME, VALUE)."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE, an option of kld-server without --, as threads=2")
    return name.lstrip("-").replace("-", "_"), value


def stop(text):
    sys.exit(f"{pathlib.Path(sys.argv[0]).name}: {text}")


def need(*programs):
    """Says which of them is missing, and what makes it."""
    missing = [str(path) for path in programs if not path.exists()]
    if missing:
        stop(f"there is no {', no '.join(missing)}: `make all bench-programs` "
             "makes them (in build/; another folder: BUILD=FOLDER of make, KLD_BIN=FOLDER of this)")
