"""proto/openapi.yaml lists what the gateway serves: no route more, no method less. Read line by line, so
that the test needs no YAML library; a path is a key of two blanks, a method one of four."""
import re

import pytest

import oip
from conftest import ROOT

METHODS = ["get", "post", "put", "delete", "patch"]


def documented():
    """{path: {method: statuses}}; an alias (*name) has the methods of its anchor (&name)."""
    routes, anchors, path, statuses = {}, {}, None, set()
    for line in (ROOT / "proto" / "openapi.yaml").read_text().splitlines():
        if line == "components:":
            break
        head = re.fullmatch(r"  (/\S*):(?: ([&*])(\w+))?", line)
        if head:
            path, sign, name = head.groups()
            routes[path] = anchors[name] if sign == "*" else {}
            if sign == "&":
                anchors[name] = routes[path]
        method = re.fullmatch(r"    (\w+):", line)
        if path and method and method.group(1) in METHODS:
            statuses = routes[path][method.group(1)] = set()
        status = re.match(r'        "(\d{3})":', line)
        if path and status:
            statuses.add(int(status.group(1)))
    return routes


def test_the_document_is_read():
    routes = documented()
    assert len(routes) >= 27 and set(routes["/v2/models/kl_div/versions/1/infer"]) == {"post"}
    assert all(routes.values()) and all(200 in statuses for methods in routes.values() for statuses in methods.values())


@pytest.mark.parametrize("path", documented())
def test_a_documented_path_is_served(server, path):
    methods = documented()[path]
    for method in METHODS:
        status, headers, body = server.request(path.replace("{name}", "x"), b"" if method != "get" else None,
                                               method=method.upper())
        if method in methods:
            assert status != 405, (method, body)
            assert status != 404 or b"no such path" not in body, (method, body)
        else:
            assert status == 405 and method.upper() not in headers["Allow"].split(", "), (method, status)


def test_a_body_that_is_too_large(server):
    """Of every route that takes one it is documented; those whose body is no tensor take 4 KiB."""
    for path, methods in documented().items():
        for method, statuses in methods.items():
            if method == "get":
                continue
            assert 413 in statuses, (path, method)
            if method == "put" or path.endswith("/infer"):
                continue
            status, _, body = server.request(path.replace("{name}", "x"), bytes(4097), method=method.upper())
            assert status == 413 and b"4096" in body, (path, method, body)


def test_what_may_come_of_a_request_is_documented():
    """Statuses that no small test can bring about at will."""
    routes = documented()
    for path in routes:
        if path.endswith("/infer"):
            assert {408, 410, 413, 429, 500, 503} <= routes[path]["post"], path
        if path.endswith("/register"):
            assert {409, 413, 429, 503} <= routes[path]["post"], path
    assert {408, 413, 429, 500, 503} <= routes["/v2/tensors/{name}"]["put"]


def test_the_longest_id(server):
    """Its length is in bytes, as the document says of all texts."""
    inputs = [{"name": name, "shape": [1, 2], "datatype": "FP32", "data": [0.5, 0.5]} for name in ("predictions", "targets")]
    for text, status in (("a" * 256, 200), ("a" * 257, 400), ("\u00e4" * 128, 200), ("\u00e4" * 129, 400)):
        assert server.json(oip.INFER, {"id": text, "inputs": inputs})[0] == status, len(text)
    assert "in bytes of UTF-8" in re.sub(r"\s+", " ", (ROOT / "proto" / "openapi.yaml").read_text())


def test_every_route_is_documented():
    """The table of routes.c, with its two stars for model and version filled in."""
    routes = ROOT / "server" / "gateway" / "routes.c"
    if not routes.exists():
        pytest.skip("the tarball has no sources")
    source = routes.read_text()
    source = source.replace('SHM("system")', '"/v2/systemsharedmemory').replace(
        'SHM("cuda")', '"/v2/cudasharedmemory').replace('memory "/', "memory/")
    table = source[source.index("static const struct kld_route routes[]"):]
    table = table[:table.index("};")]
    served = {(m.lower(), p) for m, p in re.findall(r'ROUTE\("(\w+)", "([^"]*)"', table)}
    for method, tail in re.findall(r'MODEL\("(\w+)", "([^"]*)"', table):
        served |= {(method.lower(), "/v2/models/kl_div" + tail),
                   (method.lower(), "/v2/models/kl_div/versions/1" + tail)}
    served = {(m, p.replace("*", "{name}")) for m, p in served}
    assert served == {(m, p) for p, methods in documented().items() for m in methods}


def test_documented_values_are_taken(server):
    """The enums of the document are what the server says it knows."""
    text = (ROOT / "proto" / "openapi.yaml").read_text()
    config = server.json("/v2/models/kl_div/config")[1]["parameters"]
    for key, name in [("divergence", "divergences"), ("predictions_form", "forms"),
                      ("reduction", "reductions")]:
        block = text[text.index(f"        {key}:"):]
        values = re.search(r"enum: \[([^]]*)\]", block).group(1)
        assert values == config[name]["string_value"], key
    assert oip.INFER in documented()
