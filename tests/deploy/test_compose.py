"""deploy/compose*.yaml and deploy/mps: the schema of compose files, and what they refer to: files of this tree, options
of the server, which is started with them here, on the CPU and without MPS, and each other."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from conftest import BIN, ROOT, clean_environment, library, suspend, wait_until

yaml = library("yaml")
DEPLOY = ROOT / "deploy"
COMPOSE = {path.name: yaml.safe_load(path.read_text()) for path in sorted(DEPLOY.glob("compose*.yaml"))}
DAEMONSET = yaml.safe_load((DEPLOY / "mps/kubernetes.yaml").read_text())["spec"]["template"]["spec"]
VERSION = (ROOT / "proto/VERSION").read_text().strip()


def merged():
    """The two files as compose lays one over the other: mappings key by key, volumes added, the rest replaced."""
    def lay(under, over, key=None):
        if isinstance(under, dict) and isinstance(over, dict):
            return {name: lay(under[name], over[name], name) if name in under and name in over
                    else over.get(name, under.get(name)) for name in {**under, **over}}
        return under + over if key == "volumes" else over

    return lay(COMPOSE["compose.yaml"], COMPOSE["compose.gpu.yaml"])


BOTH = {"cpu": COMPOSE["compose.yaml"], "gpu": merged()}


@pytest.mark.parametrize("name", COMPOSE)
def test_schema(name):
    library("check_jsonschema")
    result = subprocess.run([sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec",
                             DEPLOY / name], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("kind", BOTH)
def test_what_is_named_is_there(kind):
    whole = BOTH[kind]
    services, volumes = whole["services"], whole["volumes"]
    for name, service in services.items():
        waits = service.get("depends_on", [])
        assert set(waits) <= set(services)
        for other, wait in waits.items() if isinstance(waits, dict) else []:
            if wait["condition"] == "service_healthy":
                assert "healthcheck" in services[other] or other == "kld"  # the image's own
        for volume in service.get("volumes", []):
            source = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", volume).split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in volumes
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")
        if name != "folders":
            assert service["cap_drop"] == ["ALL"] and service["restart"] == "unless-stopped"
    assert services["kld"]["read_only"] is True
    assert services["kld"]["image"].removesuffix("-cuda") == f"kld:{VERSION}"
    assert services["kld"]["build"]["args"]["VERSION"] == VERSION
    assert (DEPLOY / services["kld"]["build"]["context"] / "Dockerfile").exists()
    # Prometheus finds the server, Grafana finds Prometheus.
    scrape = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    host, port = scrape["static_configs"][0]["targets"][0].split(":")
    assert host == "kld" and services[host]["ports"] == [f"127.0.0.1:8080:{port}"]
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    host, port = source["url"].removeprefix("http://").split(":")
    assert services[host]["ports"][0].endswith(f":{port}")
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/kld.yaml").read_text())["providers"][0]
    mounted = dict(volume.split(":")[1::-1] for volume in services["grafana"]["volumes"])
    assert json.loads((DEPLOY / mounted[provider["options"]["path"]] / "kld.json").read_text())["uid"] == "kld"
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == provider["options"]["path"] + "/kld.json"


COMMANDS = {**{kind: whole["services"]["kld"]["command"] for kind, whole in BOTH.items()},
            "kubernetes": DAEMONSET["containers"][0]["args"]}


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_server_takes_its_options(kind, make_server, tmp_path):
    words = [word for text in COMMANDS[kind] for word in text.split("=", 1)]
    options = {}
    for word in words:
        if word.startswith("--"):
            last = word
            options[last] = "true"
        else:
            options[last] = word
    assert options.pop("--backend", "cpu") == ("cpu" if kind == "cpu" else "cuda")
    assert options.pop("--unix", "/run/kld/kld.sock") == "/run/kld/kld.sock"
    assert ("--measure-roofline" in options) == (kind == "cpu")  # deploy/README.md says why
    if kind != "kubernetes":
        mounted = dict(volume.split(":")[1::-1] for volume in BOTH[kind]["services"]["kld"]["volumes"])
        folder, file = options["--config"].rsplit("/", 1)
        options["--config"] = shutil.copy(DEPLOY / mounted[folder] / file, tmp_path)
    for name in {"--http", "--metrics-http"} & set(options):
        options[name] = re.sub(r":\d+$", ":0", options[name])
    server = make_server(backend="cpu",
                         **{name.lstrip("-").replace("-", "_"): value for name, value in options.items()})
    # On a busy machine the gateway may say that it serves before it has its way to the worker (a second is what it waits).
    wait_until(lambda: server.request("/v2/health/ready")[0] == 200, what="readiness")
    if kind != "kubernetes":  # the level of the log, while it runs
        (tmp_path / "kld.json").write_text('{"log_level": "debug"}')
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: '"event":"reloaded","log_level":"debug"' in server.log(), 30, "a reload")


@pytest.mark.parametrize("kind", ["gpu", "kubernetes"])
def test_health_is_that_of_any_device(kind, make_server):
    """A card that is lost for good has nobody take the server of the others for ill."""
    port = next(word for word in COMMANDS[kind] if word.startswith("--metrics-http=")).rsplit(":", 1)[1]
    server = make_server(backend="cpu", device="0,0", metrics_http="127.0.0.1:0", stuck_ms=0, http_threads=1)
    wait_until(lambda: all(f"worker connected worker={i} " in server.log() for i in range(2)), what="a link to each")
    address = re.search(r"metrics have an address http=(\S+)", server.log()).group(1)
    first = server.child("worker")
    suspend(first)
    try:
        if kind == "gpu":
            probe = [word.replace("/opt/kld/bin", str(BIN)).replace(f"127.0.0.1:{port}", address)
                     for word in BOTH["gpu"]["services"]["kld"]["healthcheck"]["test"][1:]]
            assert f"http://{address}" in probe
        else:
            box = DAEMONSET["containers"][0]
            check = box["readinessProbe"]["httpGet"]
            assert {"name": check["port"], "containerPort": int(port)} in box["ports"]
            probe = ["curl", "--silent", "--fail", f"http://{address}{check['path']}"]
        result = subprocess.run(probe, capture_output=True, text=True, timeout=60, env=clean_environment())
        assert result.returncode == 0, result.stderr
    finally:
        os.kill(first, signal.SIGCONT)


def test_a_server_that_is_not_ready_is_not_healthy(make_server):
    """Its gateway lives, and ends once a request is answered whose worker is held. What is wrong is said: the check ends
    before compose would end it, which it did not."""
    health = BOTH["gpu"]["services"]["kld"]["healthcheck"]
    server = make_server(backend="cpu", metrics_http="127.0.0.1:0", stuck_ms=0, drain_ms=120000).wait_linked()
    address = re.search(r"metrics have an address http=(\S+)", server.log()).group(1)
    probe = [word.replace("/opt/kld/bin", str(BIN)).replace("127.0.0.1:9090", address) for word in health["test"][1:]]

    def check():
        return subprocess.run(probe, capture_output=True, text=True, timeout=60, env=clean_environment())
    wait_until(lambda: check().returncode == 0, what="a healthy server")
    worker, gateway = server.child("worker"), server.child("gateway")
    suspend(worker)
    body = json.dumps({"inputs": [{"name": name, "shape": [1, 2], "datatype": "FP32", "data": [0.5, 0.5]}
                                  for name in ("predictions", "targets")]})
    asker = threading.Thread(target=server.request, args=("/v2/models/kl_div/infer", body.encode()))
    asker.start()
    try:
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 1, what="the request")
        os.kill(gateway, signal.SIGTERM)
        wait_until(lambda: server.request("/v2/health/ready")[0] == 503, what="not ready")
        assert server.request("/v2/health/live")[0] == 200

        def told():  # a server that is slow gives another reason
            result = check()
            assert result.returncode != 0
            return "the server is shutting down" in result.stderr
        wait_until(told, what="the reason")
    finally:
        os.kill(worker, signal.SIGCONT)
        asker.join()
    assert float(probe[probe.index("--timeout") + 1]) < float(health["timeout"].removesuffix("s"))


def comment(name):
    """What the file's first lines say to whoever uses it."""
    return re.match(r"(#.*\n)+", (DEPLOY / name).read_text()).group()


def test_server_and_daemon_meet():
    """The same pipe folder on a volume that both mount, one user, one IPC and one PID namespace (CUDA's handles name
    processes), which clients are told of; the user of the image."""
    uid = re.search(r"^USER (\d+):", (ROOT / "Dockerfile").read_text(), re.M).group(1)
    services = BOTH["gpu"]["services"]
    assert services["mps"]["user"] == services["kld"]["user"] == f"{uid}:{uid}"
    assert services["kld"]["ipc"] == "service:mps" and services["mps"]["ipc"] == "shareable"
    assert services["kld"]["pid"] == "service:mps" and "pid" not in services["mps"]
    for word in ("ipc: service:mps", "pid: service:mps"):
        for text in ((DEPLOY / "README.md").read_text(), comment("compose.gpu.yaml")):
            assert word in text
    assert "mps:/mps" in services["mps"]["volumes"] and "mps:/mps" in services["kld"]["volumes"]
    assert services["mps"]["environment"] == services["kld"]["environment"]
    assert services["kld"]["environment"]["CUDA_MPS_PIPE_DIRECTORY"] in services["folders"]["command"]
    assert services["mps"]["deploy"] == services["kld"]["deploy"]

    for word in ("hostIPC", "hostPID"):
        assert DAEMONSET[word] is True
        for text in ((DEPLOY / "README.md").read_text(), comment("mps/kubernetes.yaml")):
            assert word in text
    assert str(DAEMONSET["securityContext"]["runAsUser"]) == uid
    daemon = next(box for box in DAEMONSET["initContainers"] if box["name"] == "mps")
    server = DAEMONSET["containers"][0]
    assert daemon["env"] == server["env"]
    assert {"name": "mps", "mountPath": "/mps"} in daemon["volumeMounts"]
    assert {"name": "mps", "mountPath": "/mps"} in server["volumeMounts"]
