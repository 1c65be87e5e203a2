"""Open Inference requests for the HTTP tests, and the FP64 value of what they ask for."""
import http.client
import json

import numpy as np

INFER = "/v2/models/kl_div/infer"
LENGTH = "Inference-Header-Content-Length"
DTYPES = {"FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"), "FP16": np.dtype("<f2"),
          "BF16": np.dtype("<u2"), "UINT8": np.dtype("u1"), "BOOL": np.dtype("?")}
NAMES = {np.dtype("<f4"): "FP32", np.dtype("<f8"): "FP64", np.dtype("<f2"): "FP16",
         np.dtype("<u2"): "BF16", np.dtype("u1"): "UINT8", np.dtype("?"): "BOOL"}


def to_bf16(values):
    """The nearest BF16, ties to even, as uint16."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    return ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16).astype("<u2")


def from_bf16(bits):
    return (bits.astype("<u4") << 16).view("<f4")


def body(inputs, outputs=None, parameters=None, binary=True, **more):
    """inputs: {name: array}; outputs: {name: parameters} -> (headers, body)."""
    tensors, tail = [], b""
    for name, array in inputs.items():
        tensor = {"name": name, "shape": list(array.shape), "datatype": NAMES[array.dtype]}
        if binary:
            tensor["parameters"] = {"binary_data_size": array.nbytes}
            tail += array.tobytes()
        else:
            tensor["data"] = array.tolist()
        tensors.append(tensor)
    request = {"inputs": tensors, **more}
    if outputs is not None:
        request["outputs"] = [{"name": n, **({"parameters": p} if p else {})}
                              for n, p in outputs.items()]
    if parameters:
        request["parameters"] = parameters
    head = json.dumps(request).encode()
    return ({LENGTH: str(len(head))} if binary else {}), head + tail


def parse(headers, data):
    """A reply -> (its JSON, {output name: array})."""
    length = int(headers.get(LENGTH, len(data)))
    reply, at, arrays = json.loads(data[:length]), length, {}
    for output in reply["outputs"]:
        dtype, shape = DTYPES[output["datatype"]], output["shape"]
        if "data" in output:
            arrays[output["name"]] = np.array(
                [np.nan if x is None else x for x in output["data"]], dtype).reshape(shape)
        elif "binary_data_size" in output.get("parameters", {}):
            size = output["parameters"]["binary_data_size"]
            arrays[output["name"]] = np.frombuffer(data[at:at + size], dtype).reshape(shape)
            at += size
    assert at == len(data)
    return reply, arrays


def infer(server, inputs, outputs=None, parameters=None, binary=True, **more):
    """Asks a server of conftest.py; -> (JSON, arrays)."""
    headers, data = body(inputs, outputs, parameters, binary, **more)
    status, reply_headers, reply = server.heard(INFER, data, headers)
    assert status == 200, reply
    return parse(reply_headers, reply)


class Connection:
    """One kept-alive connection."""

    def __init__(self, server, timeout=60):
        self.http = http.client.HTTPConnection(server.address, timeout=timeout)

    def ask(self, method, path, data=None, headers=None):
        self.http.request(method, path, body=data, headers=headers or {})
        reply = self.http.getresponse()
        return reply.status, reply.headers, reply.read()

    def __enter__(self):
        return self

    def __exit__(self, *ignored):
        self.http.close()


def _log_p(x, form, temperature):
    """(probability, its logarithm) in FP64."""
    x = np.asarray(x, np.float64)
    with np.errstate(divide="ignore"):
        if form == "probs":
            return x, np.log(x)
        if form == "logprobs":
            return np.exp(x), x
        z = x / temperature
        z = z - z.max(-1, keepdims=True)
        log = z - np.log(np.exp(z).sum(-1, keepdims=True))
        return np.exp(log), log


# A parameter for each divergence that takes one.
DIVERGENCES = {"forward_kl": {}, "reverse_kl": {}, "jeffreys": {}, "mixed_kl": {"weight": 0.3}, "js": {"beta": 0.3},
               "skew_kl": {"skew": 0.1}, "skew_reverse_kl": {"skew": 0.1}, "tv": {}, "cross_entropy": {}}


def _kl(a, b, share=0.0):
    """KL(a, m) with m = share a + (1 - share) b: terms, d/da, d/db."""
    m = share * a + (1 - share) * b
    return a * np.log(a / m), np.log(a / m) + 1 - share * a / m, -(1 - share) * a / m


def _terms(divergence, q, p, lq, beta=0.5, skew=None, weight=None):
    """Terms, d/dq, d/dp, in FP64. Strictly positive finite inputs."""
    if divergence == "tv":
        return abs(p - q) / 2, np.sign(q - p) / 2, np.sign(p - q) / 2
    if divergence == "cross_entropy":
        return -p * lq, -p / q, -lq
    forward, dp, dq = _kl(p, q, {"js": beta, "skew_kl": skew}.get(divergence, 0))
    reverse, dq_reverse, dp_reverse = _kl(q, p, {"js": 1 - beta, "skew_reverse_kl": skew}.get(divergence, 0))
    of_p, of_q = {"forward_kl": (1, 0), "skew_kl": (1, 0), "reverse_kl": (0, 1), "skew_reverse_kl": (0, 1),
                  "jeffreys": (1, 1), "mixed_kl": (weight, 1 - (weight or 0)), "js": (beta, 1 - beta)}[divergence]
    return (of_p * forward + of_q * reverse, of_p * dq + of_q * dq_reverse, of_p * dp + of_q * dp_reverse)


def _through(form, x, slope, upstream, temperature):
    """The gradient of what the tensor holds, from df/dx."""
    if form == "probs":
        return slope * upstream
    moment = x * slope * upstream
    return moment if form == "logprobs" else (moment - x * moment.sum(-1, keepdims=True)) / temperature


def expected(predictions, targets, divergence="forward_kl", predictions_form="probs",
             targets_form="probs", temperature=1.0, reduction="batchmean", scale=1.0,
             row_weights=None, row_mask=None, normalizer=None, grad_output=None, **parameters):
    """Everything that a request can ask for, in FP64. Strictly positive finite inputs."""
    q, lq = _log_p(predictions, predictions_form, temperature)
    p, _ = _log_p(targets, targets_form, temperature)
    terms, dq, dp = _terms(divergence, q, p, lq, **parameters)
    shape = terms.shape
    weight = np.ones(shape[:-1])
    if row_weights is not None:
        weight = weight * np.asarray(row_weights, np.float64).reshape(shape[:-1])
    if row_mask is not None:
        weight = weight * (np.asarray(row_mask).reshape(shape[:-1]) != 0)
    terms = terms * weight[..., None] * scale
    rows = terms.sum(-1)
    unmasked = np.ones(shape[:-1]) if row_mask is None else \
        (np.asarray(row_mask).reshape(shape[:-1]) != 0).astype(float)
    weights = unmasked * (1 if row_weights is None else
                          np.asarray(row_weights, np.float64).reshape(shape[:-1]))
    divisor = {"sum": 1.0, "mean": terms.size, "batchmean": shape[0], "row": 1.0, "none": 1.0,
               "rowmean": weights.sum()}[reduction]
    divisor = normalizer if normalizer is not None else divisor
    loss = {"none": terms, "row": rows}.get(reduction, rows.sum() / divisor)
    factor = weight[..., None] * scale / divisor * np.ones(shape)
    if grad_output is not None:
        g = np.asarray(grad_output, np.float64)
        factor = factor * (g.reshape(shape) if reduction == "none" else
                           g.reshape(shape[:-1] + (1,)) if reduction == "row" else float(g.ravel()[0]))
    return {"loss": np.atleast_1d(loss), "row_loss": np.atleast_1d(rows),
            "grad_predictions": _through(predictions_form, q, dq, factor, temperature),
            "grad_targets": _through(targets_form, p, dp, factor, temperature)}
