"""deploy/kubernetes: rendered by kubectl, held against the schemas of Kubernetes and of the custom resources, and
against what it refers to: the server's options, its probes, its metrics, each other."""
import functools
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess

import pytest

from conftest import BIN, ROOT, clean_environment, library, needs, wait_until

yaml = library("yaml")
FOLDER = ROOT / "deploy" / "kubernetes"
RENDERED = ["base", "gpu"]
PLAIN = ["examples/sidecar.yaml", "examples/kserve.yaml", "../mps/kubernetes.yaml"]
MONITOR = "examples/podmonitor.yaml"
KUBERNETES = "1.37"  # the schemas that tests/requirements.txt brings
# The oldest one that is promised, and the oldest whose schemas know all fields: what is new is off at first.
OLDEST = {"base": ("1.30", "1.29"), "gpu": ("1.30", "1.29"), "examples/kserve.yaml": ("1.30", "1.29"),
          "../mps/kubernetes.yaml": ("1.29", "1.28"), "examples/sidecar.yaml": ("1.34", "1.34")}


@functools.cache
def objects(name):
    if name.endswith(".yaml"):
        return list(yaml.safe_load_all((FOLDER / name).read_text()))
    result = subprocess.run(["kubectl", "kustomize", FOLDER / name], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return list(yaml.safe_load_all(result.stdout))


def one(name, kind):
    return next(item for item in objects(name) if item["kind"] == kind)


def pods(name):
    """[(what, pod specification), ...] of all that makes pods."""
    return [(item["kind"], item["spec"]["template"]["spec"]) for item in objects(name) if "template" in item.get("spec", {})] + \
           [(item["kind"], item["spec"]) for item in objects(name) if item["kind"] == "ServingRuntime"]


def containers(pod):
    return pod.get("initContainers", []) + pod["containers"]


def servers(name):
    return [box for _, pod in pods(name) for box in containers(pod) if box["image"].split(":")[0] == "kld"]


ALL = [pytest.param(name, marks=needs("kubectl")) for name in RENDERED] + PLAIN

# Of the custom resources: what is used of them, as their definitions have it (checked in full against those of
# prometheus-operator 0.8x and KServe 0.1x when they were written).
TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}


def closed(required, **properties):
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


CUSTOM = {
    ("monitoring.coreos.com/v1", "PodMonitor"): closed(
        ["selector", "podMetricsEndpoints"], jobLabel=TEXT,
        namespaceSelector=closed([], any={"type": "boolean"}), selector=closed([], matchLabels={"type": "object"}),
        podMetricsEndpoints={"type": "array", "minItems": 1, "items": closed(
            ["port"], port=TEXT, path=TEXT, interval={"type": "string", "pattern": r"^\d+(ms|s|m)$"},
            authorization=closed([], type=TEXT, credentials=closed(["name", "key"], name=TEXT, key=TEXT)))}),
    ("serving.kserve.io/v1alpha1", "ServingRuntime"): closed(
        ["containers"], annotations={"type": "object"}, multiModel={"type": "boolean"},
        protocolVersions={"type": "array", "items": {"enum": ["v1", "v2", "grpc-v2"]}},
        supportedModelFormats={"type": "array", "items": closed(
            ["name"], name=TEXT, version=TEXT, autoSelect={"type": "boolean"})},
        containers={"type": "array", "minItems": 1}, volumes={"type": "array"}),
    ("serving.kserve.io/v1beta1", "InferenceService"): closed(
        ["predictor"], predictor=closed(
            [], minReplicas=COUNT, maxReplicas=COUNT, timeout=COUNT, terminationGracePeriodSeconds=COUNT, model=closed(
                ["modelFormat"], modelFormat=closed(["name"], name=TEXT, version=TEXT), protocolVersion=TEXT,
                runtime=TEXT))),
}


def check_schemas(name, version):
    validator, jsonschema = library("kubernetes_validate"), library("jsonschema")
    for item in objects(name):
        known = CUSTOM.get((item["apiVersion"], item["kind"]))
        if not known:
            validator.validate(item, version, strict=True)
            continue
        assert set(item) == {"apiVersion", "kind", "metadata", "spec"}
        jsonschema.validate(item["spec"], known)
        if item["kind"] == "ServingRuntime":  # its containers are those of a pod
            pod = {"containers": item["spec"]["containers"], "volumes": item["spec"]["volumes"]}
            validator.validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "kld"}, "spec": pod},
                               version, strict=True)


@pytest.mark.parametrize("name", ALL + [MONITOR])
def test_schemas(name):
    check_schemas(name, KUBERNETES)


@pytest.mark.parametrize("name", ALL)
def test_the_oldest_kubernetes(name):
    """What the guide promises: the schemas of that version know every field, and some older one does not."""
    promised, first = OLDEST[name]
    shown = (ROOT / "deploy/README.md").read_text().split("Kubernetes from which version on", 1)[1].split("\n\n")[0]
    called = name.removeprefix("../").removeprefix("examples/")
    assert re.search(rf"`{called}`[^;]*? {promised} \(", shown), shown
    check_schemas(name, promised)
    errors = library("kubernetes_validate")
    with pytest.raises((errors.ValidationError, errors.SchemaNotFoundError)):
        check_schemas(name, "1.%d" % (int(first.split(".")[1]) - 1))


def test_a_wrong_manifest_is_found():
    """The schemas bite: a slip in a field's name, a wrong type."""
    validator = library("kubernetes_validate")
    for path, slip in (("readinessProbe", "readynessProbe"), ("ports", "port")):
        pod = json.loads(json.dumps(pods("examples/sidecar.yaml")[0][1]))
        pod["containers"][0][slip] = pod["containers"][0].pop(path, [])
        with pytest.raises(validator.ValidationError):
            validator.validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod},
                               KUBERNETES, strict=True)


@pytest.mark.parametrize("name", [name for name in ALL if name != "../mps/kubernetes.yaml"])
def test_restricted_profile(name):
    """The Pod Security Standard "restricted", rule by rule; and no writable root, which goes beyond it."""
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    for kind, pod in pods(name):
        whole = pod.get("securityContext", {})
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for volume in pod.get("volumes", []):
            assert set(volume) - {"name"} <= allowed
        for box in containers(pod):
            own = box["securityContext"]
            assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}
            assert own.get("runAsNonRoot", whole.get("runAsNonRoot")) is True
            assert own.get("runAsUser", whole.get("runAsUser")) == 10001
            profile = own.get("seccompProfile", whole.get("seccompProfile"))
            assert profile == {"type": "RuntimeDefault"} and "privileged" not in own
            assert own["readOnlyRootFilesystem"] is True
            assert not any("hostPort" in port for port in box.get("ports", []))


def test_what_the_daemonset_has_beyond_restricted():
    """Namespaces and folders of the host, and one container that is root to make these; nothing more."""
    (_, pod), = pods("../mps/kubernetes.yaml")
    assert pod["hostIPC"] is pod["hostPID"] is True and "hostNetwork" not in pod
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"] == {"runAsUser": 10001, "runAsGroup": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
    common = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
    for box in containers(pod):
        mine = {"runAsUser": 0, "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}} if box["name"] == "folders" \
            else {"runAsNonRoot": True, "capabilities": {"drop": ["ALL"]}}
        assert box["securityContext"] == {**common, **mine}, box["name"]
        assert box["name"] == "folders" or "/tmp" in {mount["mountPath"] for mount in box["volumeMounts"]}


@needs("setpriv", root=True)
def test_two_capabilities_make_the_folders(tmp_path):
    """Twice: the second start finds them, and whose they are."""
    (_, pod), = pods("../mps/kubernetes.yaml")
    box = next(box for box in containers(pod) if box["name"] == "folders")
    kept = ",".join(f"+{name.lower()}" for name in box["securityContext"]["capabilities"]["add"])
    for mount in box["volumeMounts"]:
        (tmp_path / mount["mountPath"].lstrip("/")).mkdir(parents=True)
    words = [word.replace("/host/", f"{tmp_path}/host/") for word in box["command"]]
    for _ in range(2):
        result = subprocess.run(["setpriv", f"--bounding-set=-all,{kept}", *words], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    assert {path.stat().st_uid for path in (tmp_path / "host/mps").iterdir()} == {10001}


@pytest.mark.parametrize("name", ALL)
def test_every_container_has_limits(name):
    """So that none takes the node's memory from its neighbours."""
    for kind, pod in pods(name):
        for box in containers(pod):
            resources = box.get("resources", {})
            assert "memory" in resources.get("limits", {}) and {"cpu", "memory"} <= set(resources["requests"]), box["name"]


@pytest.mark.parametrize("name", ALL)
def test_what_is_named_is_there(name):
    made = {item["metadata"]["name"] for item in objects(name) if item["kind"] == "ConfigMap"}
    for kind, pod in pods(name):
        assert {volume["configMap"]["name"] for volume in pod.get("volumes", []) if "configMap" in volume} <= made
        for box in servers(name):
            config = [word.split("=")[1].rsplit("/", 1)[0] for word in box["args"] if word.startswith("--config=")]
            assert set(config) <= {mount["mountPath"] for mount in box["volumeMounts"]}
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        claims = {claim["name"] for claim in pod.get("resourceClaims", [])}
        for box in containers(pod):
            assert {mount["name"] for mount in box.get("volumeMounts", [])} <= volumes
            assert {claim["name"] for claim in box.get("resources", {}).get("claims", [])} <= claims
            if box["image"].split(":")[0] == "kld":
                assert "/run/kld" in {mount["mountPath"] for mount in box["volumeMounts"]}  # where it has to write
    for item in objects(name):
        if item["kind"] == "InferenceService":
            runtime = one(name, "ServingRuntime")
            model = item["spec"]["predictor"]["model"]
            assert model["runtime"] == runtime["metadata"]["name"]
            assert model["modelFormat"]["name"] == runtime["spec"]["supportedModelFormats"][0]["name"]
            assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]


UNITS = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "Mi": 1 << 20, "Gi": 1 << 30}


def size(text):
    return int(re.match(r"\d+", text).group()) * UNITS[re.sub(r"\d", "", text)]


@needs("kubectl")
@pytest.mark.parametrize("name", RENDERED)
def test_selectors_ports_and_times(name):
    deployment = one(name, "Deployment")
    template = deployment["spec"]["template"]
    labels, pod = template["metadata"]["labels"], template["spec"]
    box = pod["containers"][0]
    for selector in (deployment["spec"]["selector"], one(name, "PodDisruptionBudget")["spec"]["selector"],
                     one(name, "NetworkPolicy")["spec"]["podSelector"], one(name, "PodMonitor")["spec"]["selector"],
                     {"matchLabels": one(name, "Service")["spec"]["selector"]},
                     pod["topologySpreadConstraints"][0]["labelSelector"]):
        assert selector["matchLabels"].items() <= labels.items()
    assert {item["metadata"]["namespace"] for item in objects(name)} == {"kld"}
    ports = {port["name"]: port["containerPort"] for port in box["ports"]}
    flags = dict(word.lstrip("-").split("=", 1) for word in box["args"])
    assert {flags["http"], flags["metrics-http"]} == {f"0.0.0.0:{ports['http']}", f"0.0.0.0:{ports['metrics']}"}
    named = [rule["port"] for entry in one(name, "NetworkPolicy")["spec"]["ingress"] for rule in entry["ports"]]
    named += [entry["targetPort"] for entry in one(name, "Service")["spec"]["ports"]]
    named += [entry["port"] for entry in one(name, "PodMonitor")["spec"]["podMetricsEndpoints"]]
    named += [box[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert set(named) <= set(ports)
    assert one(name, "PodMonitor")["spec"]["jobLabel"] in labels
    # Memory: what it was told to take at most, and room for the rest.
    taken = sum(size(flags[key]) for key in ("staging-bytes-max", "pool-bytes-max") if key in flags)
    assert size(box["resources"]["limits"]["memory"]) >= taken + (1 << 30)
    assert ("pool-bytes-max" in flags) == ("--backend=cuda" not in box["args"])  # the host's, or the card's


@needs("kubectl")
def test_who_reaches_a_runtimes_metrics():
    """Where probes are answered, callers could take the few connections that there are."""
    service, policy = one("examples/kserve.yaml", "InferenceService"), one("examples/kserve.yaml", "NetworkPolicy")["spec"]
    box, = servers("examples/kserve.yaml")
    flags = dict(word.lstrip("-").split("=", 1) for word in box["args"] if "=" in word)
    http, metrics = (int(flags[name].rsplit(":", 1)[1]) for name in ("http", "metrics-http"))
    assert policy["podSelector"]["matchLabels"] == {"serving.kserve.io/inferenceservice": service["metadata"]["name"]}
    assert policy["policyTypes"] == ["Ingress"]
    entries = {entry["ports"][0]["port"]: entry.get("from") for entry in policy["ingress"]}
    assert set(entries) == {http, metrics} and entries[http] is None
    assert entries[metrics] == one("base", "NetworkPolicy")["spec"]["ingress"][1]["from"]


@needs("kubectl")
def test_a_rollout_wants_no_gpu_more():
    """Which may be free nowhere; and one replica is left."""
    rolling = {name: one(name, "Deployment")["spec"]["strategy"]["rollingUpdate"] for name in RENDERED}
    assert rolling == {"base": {"maxUnavailable": 0, "maxSurge": 1}, "gpu": {"maxUnavailable": 1, "maxSurge": 0}}
    assert one("gpu", "HorizontalPodAutoscaler")["spec"]["minReplicas"] > 1


@pytest.mark.parametrize("name", ALL)
def test_times(name):
    """SIGTERM comes after preStop, SIGKILL after the rest; not ready is noticed before preStop is over. What a manifest
    leaves out is Kubernetes' default, or the server's."""
    usual = subprocess.run([BIN / "kld-server", "--help"], capture_output=True, text=True, check=True).stdout
    usual_ms = re.search(r"--drain-ms .*\[(\d+)\]", usual).group(1)
    for kind, pod in pods(name):
        if kind == "ServingRuntime":  # which has no such field
            service = one(name, "InferenceService")
            pod = {**pod, **service["spec"]["predictor"]}
            mode = service["metadata"]["annotations"]["serving.kserve.io/deploymentMode"]
            assert mode in ("RawDeployment", "Standard")  # Knative refuses both times
        box, = servers(name)
        wait_s = box.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        drain_ms = next((word.split("=")[1] for word in box["args"] if word.startswith("--drain-ms=")), usual_ms)
        assert pod.get("terminationGracePeriodSeconds", 30) >= wait_s + int(drain_ms) / 1000 + 5
        probe = box["readinessProbe"] if wait_s else {}
        assert wait_s == 0 or wait_s >= probe["periodSeconds"] * probe.get("failureThreshold", 3)


def test_the_daemonset_gets_onto_tainted_nodes():
    """Nobody adds the toleration to a pod that asks for no nvidia.com/gpu."""
    pod = one("../mps/kubernetes.yaml", "DaemonSet")["spec"]["template"]["spec"]
    assert not any("nvidia.com/gpu" in box["resources"]["limits"] for box in containers(pod))
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


@pytest.mark.parametrize("name", ["examples/sidecar.yaml", "../mps/kubernetes.yaml"])
def test_what_clients_register_fits_the_memory(name):
    """A GPU's worker pins it, so that the server is charged for what its clients have not touched."""
    box, = servers(name)
    flags = dict(word.lstrip("-").split("=", 1) for word in box["args"] if "=" in word)
    limit = size(box["resources"]["limits"]["memory"])
    shared = flags.get("shared-bytes-max", "0")
    shared = limit // 2 if shared == "0" else size(shared)  # "0" is half of it, for all devices
    assert limit >= size(flags["staging-bytes-max"]) + shared + (1 << 30)
    one_client = flags.get("client-shared-bytes-max", "0")
    assert one_client == "0" or size(one_client) <= shared


@pytest.mark.parametrize("name", ["examples/sidecar.yaml", "../mps/kubernetes.yaml"])
def test_the_monitor_finds_the_metrics(name):
    monitor = objects(MONITOR)[0]["spec"]
    endpoint, = monitor["podMetricsEndpoints"]
    item = next(item for item in objects(name) if "template" in item["spec"])
    labels = item["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["jobLabel"]] == "kld"  # as alerts and dashboard have it
    box, = servers(name)
    ports = {port["name"]: port["containerPort"] for port in box["ports"]}
    assert f"--metrics-http=0.0.0.0:{ports[endpoint['port']]}" in box["args"]
    assert "--http=127.0.0.1:8080" in box["args"]


@needs("kubectl")
def test_the_autoscaler_reads_what_prometheus_records():
    hpa = one("base", "HorizontalPodAutoscaler")["spec"]
    assert hpa["scaleTargetRef"]["name"] == one("base", "Deployment")["metadata"]["name"]
    adapters = yaml.safe_load((FOLDER / "adapter-rules.yaml").read_text())["rules"]
    groups = yaml.safe_load((ROOT / "deploy/prometheus/kld-rules.yaml").read_text())["groups"]
    assert [metric["pods"]["metric"]["name"] for metric in hpa["metrics"]] == [adapter["name"]["as"] for adapter in adapters]
    for adapter in adapters:
        series = adapter["seriesQuery"].split("{")[0]
        assert re.fullmatch(adapter["name"]["matches"], series)
        record = next(rule for group in groups for rule in group["rules"] if rule.get("record") == series)
        assert "namespace, pod" in record["expr"]
    assert hpa["minReplicas"] > one("base", "PodDisruptionBudget")["spec"]["maxUnavailable"]


def test_the_alerts_as_an_object():
    """The command in deploy/README.md, without kubectl."""
    guide = (ROOT / "deploy/README.md").read_text()
    command = re.search(r"^(\{ printf .*?;? \}) \| kubectl apply -f -$", guide, re.M | re.S).group(1)
    made = subprocess.run(["bash", "-euc", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    item = yaml.safe_load(made)
    assert (item["apiVersion"], item["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert item["spec"] == yaml.safe_load((ROOT / "deploy/prometheus/kld-rules.yaml").read_text())


def test_images_are_of_this_version():
    version = (ROOT / "proto/VERSION").read_text().strip()
    for path in [*FOLDER.rglob("*.yaml"), ROOT / "deploy/mps/kubernetes.yaml"]:
        for tag in re.findall(r"(?:image: kld:|newTag: )(\S+?)(?=[},]|$)", path.read_text(), re.M):
            assert tag.removesuffix("-cuda") == version, path


def first_steps():
    """The block of deploy/README.md that makes what the manifests name."""
    guide = (ROOT / "deploy/README.md").read_text()
    return re.search(r"^```\n(make image IMAGE=\$REGISTRY.*?)^```", guide, re.M | re.S).group(1)


def commands_for_tokens():
    """Its lines that make the tokens, without kubectl's."""
    lines = re.search(r"^(TOKEN=.*?>tokens)$", first_steps(), re.M | re.S).group(1)
    return lines + "\nprintf '%s %s' $TOKEN $SCRAPE"


@needs("kubectl")
@pytest.mark.parametrize("name, tag", [("base", ""), ("gpu", "-cuda")])
def test_the_first_steps(name, tag, tmp_path):
    """As they stand there, but for those that speak to a registry or a cluster: image, Secrets and namespace are those
    that the manifests name."""
    shutil.copytree(FOLDER, tmp_path / "deploy/kubernetes")
    stubs = "".join(f'{tool}() {{ echo {tool} "$@"; }}\n' for tool in ("make", "docker", "kubectl"))
    script = stubs + first_steps().replace("kubernetes/base", f"kubernetes/{name}").replace("kld:0.1.0", f"kld:0.1.0{tag}")
    said = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, check=True,
                          env={**os.environ, "REGISTRY": "registry.example.com/team"}).stdout
    rendered = subprocess.run(["kubectl", "kustomize", tmp_path / "deploy/kubernetes" / name], capture_output=True, text=True,
                              check=True).stdout
    items = list(yaml.safe_load_all(rendered))
    namespace, = {item["metadata"]["namespace"] for item in items}
    box = next(item for item in items if item["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert f"make image IMAGE={box['image']}\ndocker push {box['image']}\nkubectl create namespace {namespace}\n" in said
    made = re.findall(rf"^kubectl -n {namespace} create secret generic (\S+) ", said, re.M)
    wanted = set(re.findall(r"secretName: (\S+)", rendered)) | {
        item["spec"]["podMetricsEndpoints"][0]["authorization"]["credentials"]["name"]
        for item in items if item["kind"] == "PodMonitor"}
    assert set(made) == wanted and said.endswith(f"kubectl apply -k deploy/kubernetes/{name}\n"), said
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs("kubectl")) for name in RENDERED])
def test_the_guide_says_who_is_let_in(name):
    """Below the commands: label, namespace and address are those of the manifests."""
    guide = (ROOT / "deploy/README.md").read_text().split(first_steps(), 1)[1].split("With Prometheus's operator", 1)[0]
    policy, service = one(name, "NetworkPolicy"), one(name, "Service")
    callers, prometheus = (entry["from"][0] for entry in policy["spec"]["ingress"])
    (label, value), = callers["podSelector"]["matchLabels"].items()
    assert f'`{label}: "{value}"`' in guide and f"label pod NAME {label}={value}" in guide
    assert callers["namespaceSelector"] == {} and "in any namespace" in guide
    (label, value), = prometheus["namespaceSelector"]["matchLabels"].items()
    assert f"from the namespace `{value}`" in guide and f"`{label}`" in guide and "podSelector" not in prometheus
    port = next(port["port"] for port in service["spec"]["ports"] if port["name"] == "http")
    address = f"http://{service['metadata']['name']}.{service['metadata']['namespace']}:{port}"
    assert f"`{address}`" in guide and f'curl -H "Authorization: Bearer $TOKEN" {address}/' in guide


def started(box, make_server, tmp_path, tokens, **more):
    """The server with the container's arguments: other ports and files, and the CPU for the GPU."""
    flags = dict(word.lstrip("-").split("=", 1) if "=" in word else (word.lstrip("-"), "true") for word in box["args"])
    for name in ("http", "metrics-http"):
        if flags.get(name):
            flags[name] = re.sub(r":\d+$", ":0", flags[name])
    if "tokens" in flags:
        flags["tokens"] = str(tokens)
    if "config" in flags:
        text = one("base", "ConfigMap")["data"][flags["config"].rsplit("/", 1)[1]]
        flags["config"] = str(tmp_path / "kld.json")
        (tmp_path / "kld.json").write_text(text)
    flags["backend"] = "cpu"
    environment = {item["name"]: "2" if "resourceFieldRef" in item.get("valueFrom", {}) else item["value"]
                   for item in box.get("env", [])}
    return make_server(environment=environment, **{name.replace("-", "_"): text for name, text in flags.items()},
                       **more).wait_linked()


def answers(server, box, probe):
    """The status at the container's port that the probe names, in the time that it has."""
    check = box[probe]["httpGet"]
    number = {port["name"]: port["containerPort"] for port in box["ports"]}.get(check["port"], check["port"])
    flag = next(word.split("=")[0] for word in box["args"] if word.startswith("--") and word.endswith(f":{number}"))
    address = server.address if flag == "--http" else re.search(r'"event":"metrics have an address".*?"http":"([^"]+)"',
                                                                server.log()).group(1)
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=box[probe].get("timeoutSeconds", 1))
    try:
        connection.request("GET", check["path"])
        return connection.getresponse().status
    except OSError as error:
        return repr(error)
    finally:
        connection.close()


@pytest.mark.parametrize("name", [pytest.param("base", marks=needs("kubectl")), "examples/kserve.yaml"])
def test_probes_are_answered_while_callers_hold_all_connections(name, make_server, tmp_path):
    box, = servers(name)
    subprocess.run(["bash", "-euc", commands_for_tokens()], cwd=tmp_path, capture_output=True, check=True)
    server = started(box, make_server, tmp_path, tmp_path / "tokens", http_connections_max=4)
    host, port = server.address.rsplit(":", 1)
    held = []
    try:
        for _ in range(4):
            held.append(http.client.HTTPConnection("127.0.0.1", int(port), timeout=30))
            held[-1].request("GET", "/v2/health/live")
            held[-1].getresponse().read()
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            wait_until(lambda probe=probe: answers(server, box, probe) == 200, what=f"the answer to the {probe}")
    finally:
        for connection in held:
            connection.close()


@pytest.mark.parametrize("name", [name for name in ALL if name != "../mps/kubernetes.yaml"])
def test_the_server_takes_its_options_and_answers_its_probes(name, make_server, tmp_path):
    made = subprocess.run(["bash", "-euc", commands_for_tokens()], cwd=tmp_path, capture_output=True, text=True)
    token, scrape = made.stdout.split()
    assert hashlib.sha256(token.encode()).hexdigest() in (tmp_path / "tokens").read_text()
    found = servers(name)
    assert len(found) == 1
    box = found[0]
    server = started(box, make_server, tmp_path, tmp_path / "tokens")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        check = box.get(probe, {})
        if "httpGet" in check:
            wait_until(lambda probe=probe: answers(server, box, probe) == 200, what=f"the answer to the {probe}")
        elif "exec" in check:
            words = [word.replace("/opt/kld/bin", str(BIN)) for word in check["exec"]["command"]]
            result = subprocess.run(words, capture_output=True, timeout=60,
                                    env=clean_environment(KLD_SERVER=server.url_unix))
            assert result.returncode == 0, result.stderr
    if name in RENDERED:  # the level of the log, while it runs
        (tmp_path / "kld.json").write_text('{"log_level": "debug"}')
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: '"event":"reloaded","log_level":"debug"' in server.log(), 30, "a reload")
    if "tokens" in "".join(box["args"]):
        bearer = lambda word: {"Authorization": f"Bearer {word}"}  # noqa: E731
        assert server.request("/metrics")[0] == 401
        assert server.request("/metrics", headers=bearer(scrape))[0] == 200
        assert server.request("/v2/models/kl_div", headers=bearer(token))[0] == 200
        assert server.request("/metrics", headers=bearer(token))[0] == 403
