"""A convolutional net that tells drawn shapes apart: circles, squares, triangles and crosses.

    atoll dev job.py                       # train it on this machine
    atoll submit job.py --watch            # train it on a fleet
    atoll submit job.py --set WIDTH=64     # with another value of a constant below

Plain PyTorch: the model returns its loss in training, and an accuracy too in evaluation. The images are drawn
here; put yours in their place in `images`.
Dims: B batch, C channels, Y and X pixels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import Job, Optimizer, OptimizerName, Rows, Schedule, ScheduleKind, TrainingSpec

CLASSES = 4
PIXELS = 24  # a side
WIDTH = 16  # channels of the first convolution
MICRO_BATCH, N_MICRO = 32, 2  # images of a micro-batch, micro-batches of a step
STEPS = 150
LEARNING_RATE = 0.05
SAMPLES, HELD_OUT = 2048, 256


class ShapeNet(nn.Module):
    """Images [B, 1, Y, X] and labels [B] -> mean cross-entropy; in evaluation the accuracy too."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, WIDTH, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(WIDTH, 2 * WIDTH, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(2 * WIDTH * (PIXELS // 4) ** 2, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor | dict[str, Tensor]:
        logits = self.head(self.features(images).flatten(1))
        loss = F.cross_entropy(logits, labels)
        if self.training:
            return loss
        return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}


def images(count: int, seed: int) -> dict[str, Tensor]:
    """Draw ``count`` noisy shapes of random size and place; pixels in about [0, 1], and a class for each."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=random)
    size, right, down = torch.rand(3, count, 1, 1, generator=random)
    size, right, down = 4 + 4 * size, 9 + 6 * right, 9 + 6 * down
    places = torch.arange(PIXELS).float()
    x, y = places[None, None, :] - right, places[None, :, None] - down
    shapes = (
        x**2 + y**2 < size**2,
        torch.maximum(x.abs(), y.abs()) < 0.85 * size,
        (y < 0.8 * size) & (x.abs() < (y + size) / 2),
        (torch.minimum(x.abs(), y.abs()) < 0.3 * size) & (torch.maximum(x.abs(), y.abs()) < size),
    )
    drawn = torch.stack(shapes).float()[labels, torch.arange(count)]
    noise = 0.3 * torch.randn(drawn.shape, generator=random)
    return {"images": (drawn + noise)[:, None], "labels": labels}


def job() -> Job:
    """Return the job that Atoll trains."""
    torch.manual_seed(0)
    train = images(SAMPLES, seed=0)
    return Job(
        module=ShapeNet(),
        example_inputs={name: value[:MICRO_BATCH] for name, value in train.items()},
        data=Rows(train, held_out=images(HELD_OUT, seed=1)),
        training=TrainingSpec(
            steps=STEPS,
            n_micro=N_MICRO,
            optimizer=Optimizer(OptimizerName.SGD, lr=LEARNING_RATE, momentum=0.9),
            schedule=Schedule(ScheduleKind.COSINE, warmup_steps=10),
            eval_every=50,
            eval_batches=HELD_OUT // MICRO_BATCH,
        ),
        metrics=("accuracy",),
        name="my-job",
    )
