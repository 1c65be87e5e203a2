"""Rows at the edge of what the arithmetic holds, against NumPy in FP64: those that no table of cases has."""
import numpy as np
import pytest

from pythonlib import import_kld

kld = import_kld()
CLASSES = 1000


def log_softmax(z):
    z = z.astype(np.float64)
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def skewed(own, other, skew):
    """Of log-probabilities: sum own ln(own / (skew other + (1 - skew) own)), where `skew` is the own share in the mixture."""
    ln = np.logaddexp(np.log(skew) + own, np.log1p(-skew) + other)
    return (np.exp(own) * (own - ln)).sum(-1)


@pytest.fixture(scope="module")
def connection():
    with kld.connect("local:cpu") as one:
        yield one


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("skew", [1e-2, 5e-3, 1e-3, 1e-4, 1e-6])
@pytest.mark.parametrize("divergence", ["skew_kl", "skew_reverse_kl"])
@pytest.mark.parametrize("grad", [False, True])
def test_the_mass_of_the_mixture_is_all_of_one_side(connection, divergence, skew, dtype, grad):
    """Most of the row's mass lies on classes that are light on the other side: 2^-21 to 2^-29 of it. What is left of 1
    there is a rounding of FP32."""
    heights = np.arange(15, 20, 1 / 16, dtype=np.float64).astype(dtype)
    q, p = (np.zeros((len(heights), CLASSES), dtype) for _ in range(2))
    q[:, ::2], p[:, 1::2] = -heights[:, None], -heights[:, None]
    got = connection.kl_div(q, p, divergence=divergence, predictions_form="logits", targets_form="logits", skew=skew,
                            reduction="row", grad=grad).loss
    lq, lp = log_softmax(q), log_softmax(p)
    right = skewed(lp, lq, skew) if divergence == "skew_kl" else skewed(lq, lp, skew)
    assert np.abs(got / right - 1).max() < 1e-6, np.abs(got / right - 1).max()


@pytest.mark.parametrize("skew", [1e-2, 1e-4, 1e-6])
def test_gradients_where_next_to_nothing_is_left_of_the_mixture(connection, skew):
    random = np.random.default_rng(5)
    q, p = (np.zeros((64, CLASSES), np.float16) for _ in range(2))
    q[:, ::2], p[:, 1::2] = (-random.uniform(12, 18, (64, CLASSES // 2)) for _ in range(2))
    scale = 1e4  # into the range of FP16
    got = connection.kl_div(q, p, divergence="skew_kl", predictions_form="logits", targets_form="logits", skew=skew,
                            reduction="sum", scale=scale, grad=("predictions", "targets"))
    lq, lp = log_softmax(q), log_softmax(p)
    lm = np.logaddexp(np.log(skew) + lp, np.log1p(-skew) + lq)
    heads = {"grad_predictions": (lq, -(1 - skew) * np.exp(lp - lm)),
             "grad_targets": (lp, lp - lm + 1 - skew * np.exp(lp - lm))}
    for name, (own, head) in heads.items():
        right = scale * np.exp(own) * (head - (np.exp(own) * head).sum(-1, keepdims=True))
        off = np.abs(getattr(got, name).astype(np.float64) - right)
        allowed = 2.0 ** -10 * np.abs(right) + 1e-5 * np.abs(right).max(-1, keepdims=True) + 2.0 ** -24
        assert (off <= allowed).all(), (name, (off / allowed).max())


def test_a_peak_over_a_million_equal_classes(connection):
    """FP64: the logarithm of the ratio of two sums, one a million times the other."""
    classes = (1 << 20) + 3
    q, p = np.zeros((1, classes)), np.full((1, classes), -200.0)
    p[0, 7] = 0
    got = connection.kl_div(q, p, predictions_form="logits", targets_form="logits", reduction="sum").loss
    assert abs(got / np.log(classes) - 1) < 1e-13
