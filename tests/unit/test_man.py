"""The man pages say of each option what --help says, and of none that there is not; mandoc (Debian: mandoc) finds nothing wrong.

Runs on the sources only; needs gcc. The tables of options are read as the compiler sees them.
"""
import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted(path for part in ("server", "client") for path in (ROOT / part).glob("*.[1-9]"))
SERVER, TOOL, LIBRARY = ROOT / "server/kld-server.8", ROOT / "client/kld.1", ROOT / "client/libkld.3"
COMMON = "Options of every command"
HELP_PROGRAM = '#include "server/config.h"\nint main(void) { kld_config_help(stdout); }\n'
ENTRY = re.compile(r'\{\s*"([a-z-]+)",\s*KLD_OPTION_\w+,\s*(\(\(void \*\)0\)|NULL|"[^"]*"),\s*((?:"(?:[^"\\]|\\.)*"\s*)+),')


def readable(text):
    """Without roff's escapes, which hyphens of commands, a dot at the start of a line and backslashes want."""
    return text.replace(r"\-", "-").replace(r"\&", "").replace(r"\e", "\\")


def options_of(page):
    """{heading: {"--name VALUE": its text}} of the lists whose items are options; of -h, --help the text is None."""
    found, heading, item = {}, None, None
    for line in page.read_text().splitlines():
        if line.startswith((".Ss ", ".Sh ")):
            heading, item = line[4:], None
        elif line.startswith(".It Fl "):
            item = re.sub(r"(^| )Fl ", r"\1-", line[4:].replace(" , ", ", ")).replace(" Ar ", " ")
            assert item not in found.setdefault(heading, {}), (page, heading, item)
            found[heading][item] = ""
        elif line.startswith((".It", ".El")):
            item = None
        elif item:
            assert not line.startswith("."), (page, item, line)
            found[heading][item] = readable(f"{found[heading][item]} {line}".strip())
    for options in found.values():
        if "-h, --help" in options:
            options["-h, --help"] = None
    return found


def options_of_the_server(folder):
    """What --help lists, from the file that prints it."""
    (folder / "help.c").write_text(HELP_PROGRAM)
    subprocess.run(["gcc", "-std=c17", "-D_GNU_SOURCE", f"-I{ROOT}", folder / "help.c", ROOT / "server/config_help.c",
                    "-o", folder / "help"], check=True)
    said = subprocess.run([folder / "help"], capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^  (-[^ ]+(?: --help| [A-Z]+)?) +(.*)$", said, re.M)
    return {item: None if item == "-h, --help" else text for item, text in lines}


def options_of_the_tool():
    """{command: {"--name VALUE": its help}} from the tables of client/cli."""
    found = {}
    for file in sorted((ROOT / "client/cli").glob("*.c")):
        if "KLD_OPTIONS_END" not in file.read_text():
            continue
        text = subprocess.run(["gcc", "-E", "-P", "-std=c17", "-D_GNU_SOURCE", f"-I{ROOT}", file], capture_output=True,
                              text=True, check=True).stdout
        tables = dict(re.findall(r"struct kld_option (\w+)\[\] = \{(.*?)\n?\};", text, re.S))
        commands = re.findall(r"struct kld_command kld_command_(\w+) = \{(.*?)\};", text, re.S)
        for command, fields in commands:
            options = {"-h, --help": None}
            for name, value, strings in ENTRY.findall(tables[re.search(r"\.options = (\w+)", fields).group(1)]):
                item = ("--" if name[1:] else "-") + name + (f" {value[1:-1]}" if value.startswith('"') else "")
                options[item] = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', strings))
            found[command] = options
    return found


def test_there_are_pages():
    assert {SERVER, TOOL, LIBRARY} == set(PAGES)


def test_options_of_the_server(tmp_path):
    there = options_of_the_server(tmp_path)
    assert len(there) > 80 and "--http TEXT" in there and "--sandbox" in there, there
    told = [pair for options in options_of(SERVER).values() for pair in options.items()]
    assert told == list(there.items()), "in the order of the table, in its words"


def test_options_of_the_tool():
    there, told = options_of_the_tool(), options_of(TOOL)
    assert {"div", "top", "bench", "status", "ping"} <= set(there) and "-n N" in there["top"], there
    common = told.pop(COMMON)
    assert set(told) == {f"kld {command}" for command in there}
    for command, options in there.items():
        assert {**told[f"kld {command}"], **common} == options, command
        assert not set(told[f"kld {command}"]) & set(common), command


def test_what_a_page_names_in_passing(tmp_path):
    """Options in running text and in examples: each is one of ours, or, behind curl's name and pkg-config's, theirs."""
    ours = {word for options in (options_of_the_server(tmp_path), *options_of_the_tool().values())
            for item in options for word in re.findall(r"--[a-z-]+", item)} | {"--version"}
    theirs = {"--retry", "--retry-delay", "--retry-connrefused", "--cflags", "--libs", "--static", "--option", "--flag"}
    for page in PAGES:
        text = readable(re.sub(r'^\.\\".*$', "", page.read_text(), flags=re.M))
        macros = [f"-{word}" for line in re.findall(r"^\.(?:.* )?Fl (.*)$", text, re.M) for word in re.findall(r"-[a-z-]+", line)]
        words = set(macros) | set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
        assert words <= ours | theirs, (page, words - ours - theirs)


def test_functions_and_headers_are_there():
    text = LIBRARY.read_text()
    header = "".join((ROOT / name).read_text() for name in ("client/kld.h", "proto/op.h", "proto/status.h"))
    names = re.findall(r"^\.(?:Fn|Dv) (\w+)", text, re.M) + re.findall(r"^\.Vt \w+ (\w+)", text, re.M)
    assert len(names) > 6
    assert [name for name in names if not re.search(rf"\b{name}\b", header)] == []
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"{name}.h" in makefile for name in re.findall(r"^\.In kld/(\w+)\.h", text, re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_mandoc_finds_nothing(page):
    if not shutil.which("mandoc"):
        assert os.environ.get("CI") != "true", "no mandoc (Debian: mandoc)"
        pytest.skip("no mandoc (Debian: mandoc)")
    done = subprocess.run(["mandoc", "-Tlint", "-Wwarning", page], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout + done.stderr == "", done
