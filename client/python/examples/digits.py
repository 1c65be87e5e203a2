"""The digits that the examples learn from: 1797 handwritten ones of 8 x 8 pixels (UCI, "Optical Recognition of
Handwritten Digits"), from tests/data/digits or a file that the environment's KLD_DIGITS names; a teacher, a student,
and how the student is trained. No kld here: each example brings its own distance."""
import os
import pathlib
import sys

import numpy as np
import torch
import torch.nn as nn

STEPS = 120


def load(device="cpu"):
    """-> pixels [N, 64] from 0 to 1 and labels [N], of images to learn from and of others to be asked about."""
    here = pathlib.Path(__file__).resolve().parents
    places = [os.environ.get("KLD_DIGITS")] + [up / "tests/data/digits/images.npz" for up in here[1:4]]
    place = next((place for place in places if place and pathlib.Path(place).is_file()), None)
    if place is None:
        sys.exit(f"no digits: expected tests/data/digits/images.npz of kld's sources above {here[0]}, or the "
                 f"environment's KLD_DIGITS to name that file, not {places[0]!r}")
    with np.load(place) as data:
        pixels = torch.from_numpy(data["images"].reshape(-1, 64)).float().to(device) / 16
        labels = torch.from_numpy(data["labels"]).long().to(device)
    return (pixels[0::2], labels[0::2]), (pixels[1::2], labels[1::2])


def shrunk(pixels):
    """What the student sees: 4 x 4 pixels."""
    return pixels.view(-1, 4, 2, 4, 2).mean(dim=(2, 4)).reshape(-1, 16)


def trained_teacher(device="cpu"):
    """Learns the labels."""
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    (pixels, labels), _ = load(device)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(teacher(pixels), labels).backward()
        optimizer.step()
    return teacher.requires_grad_(False)


def new_student(device="cpu"):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)


def train(student, distance, device="cpu"):
    """Minimises distance(the student's logits of all images to learn from) -> the losses."""
    (pixels, _), _ = load(device)
    inputs, losses = shrunk(pixels), []
    optimizer = torch.optim.SGD(student.parameters(), lr=0.2, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = distance(student(inputs))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def accuracy(student, device="cpu"):
    _, (pixels, labels) = load(device)
    return float((student(shrunk(pixels)).argmax(-1) == labels).float().mean())
