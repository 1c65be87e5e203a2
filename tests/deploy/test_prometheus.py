"""Alerts, records and the dashboard: promtool on the rules and their unit tests, and a real Prometheus that scrapes
a real server and is asked every query of the dashboard and of the rules; and one that scrapes servers which are gone or
cannot start."""
import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request

import pytest

from conftest import BIN, DATA, ROOT, Server, library, needs, wait_until

yaml = library("yaml")

RULES = ROOT / "deploy" / "prometheus" / "kld-rules.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "kld.json"
TESTS = ROOT / "tests" / "deploy" / "rules_test.yaml"


def rules():
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels():
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


QUERIES = {f"{panel['title']}, {target['refId']}": target["expr"] for panel in panels()
           for target in panel["targets"]}


@needs("promtool")
@pytest.mark.parametrize("command", [["check", "rules", RULES], ["test", "rules", TESTS],
                                     ["check", "config", ROOT / "deploy/prometheus/prometheus.yml"]],
                         ids=["rules", "tests", "config"])
def test_promtool(command):
    result = subprocess.run(["promtool", *map(str, command)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


# Names that are older than the conventions, and Triton's, which are what its dashboards ask for.
UNCONVENTIONAL = re.compile(r"kld_kernel_ns_total |nv_inference_")


def table():
    """{metric: (type, unit, labels)} as the server prints it."""
    text = subprocess.run([BIN / "kld-server", "--help-metrics"], capture_output=True, text=True, check=True).stdout
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {row[0].strip("`"): (row[1], row[2], set(filter(None, row[3].split(", ")))) for row in rows}


def test_the_guide_has_todays_metrics():
    shown = re.search(r"<!-- kld-server --help-metrics -->\n(.*?)\n<!-- end of it -->",
                      (ROOT / "deploy/README.md").read_text(), re.S).group(1)
    printed = subprocess.run([BIN / "kld-server", "--help-metrics"], capture_output=True, text=True).stdout
    assert shown == printed.rstrip("\n"), "make metrics"


def samples(text):
    """(metric, type, sample's name, names of its labels) of each line."""
    metric = kind = None
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            metric, kind = line.split()[2:]
        elif not line.startswith("#"):
            name, labels = re.fullmatch(r"(\w+)(?:\{(.*)\})? \S+", line).groups()
            yield metric, kind, name, set(re.findall(r'(\w+)="', labels or ""))


def test_metrics_are_as_the_table_says(scraped_text):
    known, seen = table(), set()
    for metric, kind, name, labels in samples(scraped_text):
        assert name == metric or (kind == "histogram" and name.removeprefix(metric) in ("_bucket", "_sum", "_count"))
        assert known[metric][0] == kind, metric
        assert labels - {"le"} <= known[metric][2], (name, labels)
        seen.add(metric)
    gpu_only = {"nv_gpu_memory_total_bytes"} if "GPU-" not in scraped_text else set()
    assert seen == set(known) - gpu_only
    for name, (kind, unit, _) in known.items():
        if not UNCONVENTIONAL.match(name + " "):
            assert kind != "counter" or name.endswith("_total"), name
            assert unit in ("", "seconds", "bytes", "bytes a second"), name


@needs("promtool")
def test_metrics_follow_the_conventions(scraped_text):
    result = subprocess.run(["promtool", "check", "metrics"], input=scraped_text, capture_output=True, text=True, timeout=60)
    said = [line for line in (result.stdout + result.stderr).splitlines() if not UNCONVENTIONAL.match(line)]
    assert not said


def test_every_alert_fires_once_and_is_silent_once_and_explained():
    fired, silent = set(), set()
    for test in yaml.safe_load(TESTS.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            (fired if case.get("exp_alerts") else silent).add(case["alertname"])
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert fired == silent == set(alerts)
    headings = re.findall(r"^#+ (\w+)$", (ROOT / "deploy/README.md").read_text(), re.M)
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook"] == f"deploy/README.md#{name.lower()}" and name in headings
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_the_dashboard_is_one():
    """What Grafana would refuse or show wrong: ids and places are unique, each panel has its queries and unit."""
    board = json.loads(DASHBOARD.read_text())
    assert board["uid"] == "kld" and board["title"] == "kld" and board["schemaVersion"] >= 36
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["targets"] and panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert 'instance=~"$instance"' in target["expr"]
    shown = set().union(*(words_of(query)[0] for query in QUERIES.values()))
    assert {f"kld_{role}_{what}_total" for role in ("worker", "gateway") for what in ("restarts", "stuck")} <= shown
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert source["datasources"][0]["type"] == "prometheus"


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return "127.0.0.1:%d" % free.getsockname()[1]


class Prometheus:
    def __init__(self, folder, targets, edit=lambda rules: rules):
        self.address = free_address()
        (folder / RULES.name).write_text(edit(RULES.read_text()))
        (folder / "prometheus.yml").write_text(json.dumps({
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"}, "rule_files": [RULES.name],
            "scrape_configs": [{"job_name": "kld", "static_configs": [{"targets": targets}]}]}))
        self.log = open(folder / "log", "w+")
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address={self.address}", "--log.level=warn"], stdout=self.log, stderr=self.log)

    def get(self, path, **query):
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)["data"]

    def up(self):
        if self.process.poll() is not None:
            self.log.seek(0)
            pytest.fail(self.log.read())
        try:
            return self.get("query", query='up{job="kld"} == 1')["result"]
        except OSError:
            return None

    def firing(self):
        """{(alert, instance), ...}"""
        self.up()
        try:
            return {(row["labels"]["alertname"], row["labels"].get("instance"))
                    for row in self.get("alerts")["alerts"] if row["state"] == "firing"}
        except OSError:
            return set()

    def stop(self):
        self.process.terminate()
        self.process.wait(30)
        self.log.close()


class CannotStart(threading.Thread):
    """What kld.socket and kld.service do with a server that fails: the socket stays, and it is started again after
    RestartSec."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.over, self.statuses = folder, threading.Event(), []
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.address = "127.0.0.1:%d" % self.listening.getsockname()[1]
        unit = (ROOT / "deploy/systemd/kld.service").read_text()
        self.pause_s = int(re.search(r"^RestartSec=(\d+)s$", unit, re.M).group(1))

    def run(self):
        # As systemd does it: the socket as descriptor 3, and whom it is for.
        become = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ['LISTEN_PID'] = str(os.getpid()); " \
                 "os.execv(sys.argv[2], sys.argv[2:])"
        passed = self.listening.fileno()
        with open(self.folder / "server.log", "w") as log:
            while not self.over.wait(self.pause_s if self.statuses else 0):
                self.statuses.append(subprocess.run(
                    ["/usr/bin/python3", "-c", become, str(passed), BIN / "kld-server", "--device", "99",
                     "--unix", self.folder / "kld.sock"], env={**os.environ, "LISTEN_FDS": "1"}, pass_fds=[passed],
                    stdout=log, stderr=log, timeout=60).returncode)

    def stop(self):
        self.over.set()
        self.join()
        self.listening.close()


@needs("prometheus")
def test_a_full_gateway_is_seen(tmp_path):
    """What the autoscaler reads rises where small requests keep the one HTTP loop busy, and is near 0 before."""
    def hasty(rules):
        return rules.replace("[1m]", "[4s]")

    def ratio():
        found = prometheus.get("query", query="kld:gateway_cpu:ratio")["result"]
        return float(found[0]["value"][1]) if found else None

    server = Server(backend="cpu", threads=1, http_threads=1)
    prometheus = Prometheus(tmp_path, [server.address], hasty)
    try:
        wait_until(prometheus.up, 30, "a scrape")
        wait_until(lambda: (idle := ratio()) is not None and idle < 0.03, 60, "a gateway that is idle after its start")
        load = subprocess.Popen([BIN / "kld", "bench", "--server", server.http, "--shape", "2x8", "--in-flight", "64",
                                 "--seconds", "120"], stdout=subprocess.DEVNULL)
        try:
            # Near 1 where client, gateway and worker have a CPU each; far less where they share two with others.
            wait_until(lambda: ratio() > 0.2, 60, "the rise")
        finally:
            load.terminate()
            load.wait(30)
        assert server.stop() == 0
    finally:
        prometheus.stop()
        server.remove()


@needs("prometheus")
def test_a_server_that_is_gone_or_cannot_start_is_told_of(tmp_path):
    """A hasty Prometheus: half a second stands for the 15 s of a scrape, and what the alerts wait shrinks alike."""
    def hasty(rules):
        rules, count = re.subn(r"(?<=for: )(30s|1m)$|(?<=\[)1m(?=\])", lambda found: "2s" if found.group(1) else "3s",
                               rules, flags=re.M)
        assert count > 5
        return rules

    gone, failing = free_address(), CannotStart(tmp_path)
    prometheus = Prometheus(tmp_path, [gone, failing.address], hasty)
    failing.start()
    try:
        wanted = {("KldDown", gone), ("KldNotReady", failing.address), ("KldRestarts", failing.address)}
        seen = set()  # they need not fire at one time: a start fails between others that have not failed yet
        wait_until(lambda: seen.update(prometheus.firing()) or wanted <= seen, 90, "three alerts")
        said = prometheus.get("query", query="max_over_time(kld_draining[1m])")["result"]
        assert [row["value"][1] for row in said] == ["0"]  # nobody told it to stop
    finally:
        failing.stop()
        prometheus.stop()
    assert set(failing.statuses) == {1}


@pytest.fixture(scope="module")
def scraped(tmp_path_factory, backend):
    """(prometheus, server): after a few scrapes with requests over both fronts in between."""
    server = Server(backend=backend, measure_roofline="true")
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), [server.address])
    try:
        wait_until(prometheus.up, 30, "a scrape")
        end = time.monotonic() + 3
        while time.monotonic() < end:
            for url in (server.http, server.url_unix):
                result = subprocess.run([BIN / "kld", "div", DATA / "digits/student.npy", DATA / "digits/teacher.npy",
                                         "--server", url], capture_output=True, text=True, timeout=60)
                assert result.returncode == 0, result.stderr
            time.sleep(0.2)
        yield prometheus, server
        assert server.stop() == 0
    finally:
        prometheus.stop()
        server.remove()


@pytest.fixture(scope="module")
def scraped_text(backend):
    """/metrics after requests over both fronts, with everything in it that can be."""
    server = Server(backend=backend, roofline_bytes_per_s="100G")
    try:
        for url in (server.http, server.url_unix):
            result = subprocess.run([BIN / "kld", "div", DATA / "digits/student.npy", DATA / "digits/teacher.npy",
                                     "--server", url], capture_output=True, text=True, timeout=60)
            assert result.returncode == 0, result.stderr

        def text():
            body = server.request("/metrics")[2].decode()
            return "process_open_fds{" in body and body
        yield wait_until(text, 30, "the first look at the processes")
        assert server.stop() == 0
    finally:
        server.remove()


@needs("prometheus")
@pytest.mark.parametrize("title", QUERIES)
def test_every_query_of_the_dashboard_has_an_answer(title, scraped):
    prometheus, server = scraped
    query = QUERIES[title].replace("$__rate_interval", "5s").replace("$instance", ".*")
    assert "$" not in query
    result = prometheus.get("query", query=query)["result"]
    assert result, query
    labels = set(re.findall(r"\{\{(\w+)\}\}", json.dumps(next(
        target["legendFormat"] for panel in panels() for target in panel["targets"]
        if f"{panel['title']}, {target['refId']}" == title))))
    assert all(labels <= set(row["metric"]) for row in result), (labels, result)


def words_of(expression):
    """Names of metrics of the server, and values of the label status, in an expression."""
    names = set(re.findall(r"(?<![\w:])(?:kld|process)_\w+", expression))
    return names, set("|".join(re.findall(r'status=~?"([^"]+)"', expression)).split("|")) - {""}


@needs("prometheus")
def test_every_metric_of_the_rules_is_there(scraped):
    prometheus, server = scraped
    there = {re.split(r"[{ ]", line)[0] for line in server.metrics()}
    statuses = set(re.findall(r'status="(\w+)"', "\n".join(server.metrics())))
    for text in [rule["expr"] for rule in rules()] + list(QUERIES.values()):
        names, values = words_of(text)
        assert names <= there and values <= statuses, text


@needs("prometheus")
def test_every_rule_is_evaluated(scraped):
    prometheus, _ = scraped
    found = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(found) == len(rules())
    for rule in found:
        assert rule["health"] == "ok", rule
        assert rule["type"] == "recording" or not rule["alerts"], rule
    # The latency that replicas are added by: the server waited for something and says how long.
    for record in ("kld:queue_seconds:mean", "kld:requests:rate1m", "kld:kernel_bandwidth:rate5m",
                   "kld:op_bandwidth:rate5m", "kld:roofline_ratio:rate5m"):
        rows = prometheus.get("query", query=f"{record} >= 0")["result"]
        assert rows, record
