#!/usr/bin/env python3
"""Have a model's predictions drifted since last week? Cells of a notebook, over HTTP; NumPy and kld only.

  drift.py http://HOST:PORT PREDICTIONS.npy OTHERS.npy    each [N, classes], class probabilities

Compares the mean prediction of buckets of 64 samples with that of the whole reference, by the Jensen-Shannon
divergence, one value a bucket, all in one request."""
# %% What the model said last week, and what it says today
import sys

import numpy as np

import kld

if len(sys.argv) != 4:
    sys.exit(__doc__)
URL, *FILES = sys.argv[1:]
BUCKET = 64
reference, today = (np.load(name).astype(np.float32) for name in FILES)


def buckets(predictions):
    """Mean predictions: [buckets, classes]."""
    count = len(predictions) // BUCKET
    return predictions[:count * BUCKET].reshape(count, BUCKET, -1).mean(axis=1, dtype=np.float64).astype(np.float32)


def drift(connection, predictions, whole):
    rows = buckets(predictions)
    return connection.kl_div(rows, np.broadcast_to(whole, rows.shape), divergence="js", reduction="row",
                             grad=False).loss


# %% The reference against itself says how much is chance
with kld.connect(URL) as connection:
    expected = reference.mean(axis=0, dtype=np.float64).astype(np.float32)
    chance = drift(connection, reference, expected)
    found = drift(connection, today, expected)

# %% Beyond three times the largest of chance it is drift
limit = 3 * float(chance.max())
for number, value in enumerate(found):
    print(f"bucket {number:2}: {value:.5f} {'DRIFT' if value > limit else 'fine'}")
print(f"limit {limit:.5f} (3 x chance); {int((found > limit).sum())} of {len(found)} buckets drifted")
