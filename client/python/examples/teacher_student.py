#!/usr/bin/env python3
"""A teacher's process publishes its logits once; a student's process trains from them where they lie, on real
handwritten digits. No tensor is copied between the two.

  teacher_student.py unix:PATH [cpu|cuda]           both, in processes of their own
  teacher_student.py teacher unix:PATH [cpu|cuda]   until its standard input ends
  teacher_student.py student unix:PATH [cpu|cuda]

On a CPU the logits are in shared memory, on a GPU in PyTorch's own, opened by handle."""
import subprocess
import sys

import torch

import digits
import kld
from kld.functional import kl_div

NAME = "example/digits"
TEMPERATURE = 3.0


def teach(url, device):
    (pixels, _), _ = digits.load(device)
    logits = digits.trained_teacher(device)(pixels)
    with kld.connect(url) as connection:
        # A CUDA tensor is published itself; on a CPU its copy in shared memory.
        with connection.publish(NAME, logits if device == "cuda" else logits.numpy(), form="logits"):
            print(f"teacher: published {tuple(logits.shape)}", flush=True)
            sys.stdin.read()
    print("teacher: done", flush=True)


def learn(url, device):
    with kld.connect(url) as connection, connection.attach(NAME, timeout=60) as logits:
        student = digits.new_student(device)

        def distance(mine):
            return kl_div(mine, logits, reduction="batchmean", input_form="logits", temperature=TEMPERATURE,
                          scale=TEMPERATURE**2)

        losses = digits.train(student, distance, device)
        print(f"student: loss {losses[0]:.6f} -> {losses[-1]:.6f}, {digits.accuracy(student, device):.4f} of the "
              "other digits right", flush=True)


def main():
    roles = {"teacher": teach, "student": learn}
    role, *rest = sys.argv[1:] if len(sys.argv) > 1 and sys.argv[1] in roles else (None, *sys.argv[1:])
    if not rest:
        sys.exit(__doc__)
    url, device = rest[0], rest[1] if len(rest) > 1 else "cpu"
    torch.use_deterministic_algorithms(True, warn_only=True)
    if role:
        return roles[role](url, device)
    digits.load()  # where there are none, that is said before the student waits for a teacher
    with subprocess.Popen([sys.executable, __file__, "teacher", url, device], stdin=subprocess.PIPE) as teacher:
        student = subprocess.run([sys.executable, __file__, "student", url, device])
        teacher.stdin.close()
    return student.returncode or teacher.returncode


if __name__ == "__main__":
    sys.exit(main())
