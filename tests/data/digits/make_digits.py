#!/usr/bin/env python3
"""Makes the arrays in this folder: what a teacher and a student say about real handwritten digits.

Data: UCI "Optical Recognition of Handwritten Digits" (1797 images of 8 x 8), as scikit-learn ships it
(Debian: apt-get install python3-sklearn). The teacher is a neural network on all 64 pixels, the
student a logistic regression on images shrunk to 4 x 4; both are trained on the same half of the
images and asked about the other half. The files:

  teacher.npy   targets      FP32 [N, 10]  class probabilities of the teacher
  student.npy   predictions  FP32 [N, 10]  class probabilities of the student
  loss.npy      FP64 [1]      forward KL of those FP32 numbers, batchmean, summed exactly in FP64
  gradient.npy  FP64 [N, 10]  its gradient with respect to the predictions
  images.npz    UINT8         all the images, 8 x 8, and their labels: for client/python/examples. E. Alpaydin and
                              C. Kaynak, UCI Machine Learning Repository, 1998, licence CC BY 4.0

No kld code is involved: loss and gradient come from NumPy and math.fsum.
"""
import math
import pathlib

import numpy
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier

FOLDER = pathlib.Path(__file__).resolve().parent


def main():
    digits = load_digits()
    pixels = digits.data / 16.0
    small = digits.images.reshape(-1, 4, 2, 4, 2).mean(axis=(2, 4)).reshape(-1, 16) / 16.0
    train = numpy.arange(len(pixels)) % 2 == 0
    teacher = MLPClassifier((64,), alpha=1e-3, max_iter=400, random_state=0)
    teacher.fit(pixels[train], digits.target[train])
    student = LogisticRegression(max_iter=1000)
    student.fit(small[train], digits.target[train])
    targets = teacher.predict_proba(pixels[~train]).astype(numpy.float32)
    predictions = student.predict_proba(small[~train]).astype(numpy.float32)
    for name, model, data in (("teacher", teacher, pixels), ("student", student, small)):
        print(f"{name}: {model.score(data[~train], digits.target[~train]):.3f} of the digits right")

    p, q = targets.astype(numpy.float64), predictions.astype(numpy.float64)
    assert (q > 0).all()
    terms = numpy.where(p > 0, p * (numpy.log(numpy.where(p > 0, p, 1)) - numpy.log(q)), 0)
    loss = math.fsum(terms.ravel()) / len(p)
    gradient = numpy.where(p > 0, -p / q, 0) / len(p)
    print(f"{p.shape[0]} rows, loss {loss:.17g}")
    for name, array in (("teacher", targets), ("student", predictions),
                        ("loss", numpy.array([loss])), ("gradient", gradient)):
        numpy.save(FOLDER / f"{name}.npy", array)
    numpy.savez_compressed(FOLDER / "images.npz", images=digits.images.astype(numpy.uint8),
                           labels=digits.target.astype(numpy.uint8))


if __name__ == "__main__":
    main()
