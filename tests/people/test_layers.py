"""Stock layers and losses of torch, each trained as the plain loop trains it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F

from atoll.errors import AtollError
from atoll.job import Optimizer, OptimizerName
from coordinator.client.prepare import prepare
from tests.parameters import sampled
from tests.people.loop import Case, case, job_of, refusal, run

G = torch.Generator


def vectors(width: int = 6, rows: int = 32) -> dict[str, Tensor]:
    g = G().manual_seed(5)
    return {"x": torch.randn(rows, width, generator=g), "y": torch.randint(0, 4, (rows,), generator=g)}


def images() -> dict[str, Tensor]:
    g = G().manual_seed(5)
    return {"x": torch.randn(32, 3, 8, 8, generator=g), "y": torch.randint(0, 4, (32,), generator=g)}


def tokens() -> dict[str, Tensor]:
    x = torch.randint(0, 12, (32, 5), generator=G().manual_seed(5))
    return {"x": x, "y": (x.sum(1) % 4)}


class Classifier(nn.Module):
    """``body`` before a linear head over what it gives, flattened."""

    def __init__(self, body: nn.Module, features: int, **loss: object) -> None:
        super().__init__()
        self.body, self.head, self.loss = body, nn.Linear(features, 4), nn.CrossEntropyLoss(**loss)  # type: ignore[arg-type]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.body(x)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        loss = self.loss(self.head(torch.tanh(hidden).flatten(1)), y)
        assert isinstance(loss, Tensor)
        return loss


def weight_norm() -> nn.Module:
    return Classifier(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), 8)


def spectral_norm() -> nn.Module:
    return Classifier(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), 8)


def spectral_norm_by_hooks() -> nn.Module:
    return Classifier(nn.utils.spectral_norm(nn.Linear(6, 8)), 8)


def spectral_norm_of_convolutions() -> nn.Module:
    norm = nn.utils.parametrizations.spectral_norm
    convolutions = norm(nn.Conv2d(3, 4, 3), n_power_iterations=2), norm(nn.ConvTranspose2d(4, 2, 3))
    return Classifier(nn.Sequential(*convolutions), 128)


def weight_norm_by_hooks() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # deprecated, and widely used
        return Classifier(nn.utils.weight_norm(nn.Linear(6, 8)), 8)


def orthogonal() -> nn.Module:
    return Classifier(nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)), 6)


def orthogonal_columns() -> nn.Module:
    return Classifier(nn.utils.parametrizations.orthogonal(nn.Linear(6, 8)), 8)


def sparse_embedding() -> nn.Module:
    return Classifier(nn.Embedding(12, 3, padding_idx=0, sparse=True), 15)


def embedding_with_padding() -> nn.Module:
    return Classifier(nn.Embedding(12, 3, padding_idx=0), 15)


def sparse_embedding_bag() -> nn.Module:
    return Classifier(nn.EmbeddingBag(12, 6, mode="sum", sparse=True), 6)


def embedding_max_norm() -> nn.Module:
    return Classifier(nn.Embedding(12, 3, max_norm=1.0), 15)


def embedding_bag() -> nn.Module:
    return Classifier(nn.EmbeddingBag(12, 6, mode="mean"), 6)


def cumulative_batch_norm() -> nn.Module:
    return Classifier(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None)), 8)


def cumulative_batch_norm_of_images() -> nn.Module:
    return Classifier(nn.Sequential(nn.BatchNorm2d(3, momentum=None, affine=False), nn.Flatten()), 192)


def batch_norm() -> nn.Module:
    return Classifier(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), 8)


def batch_norm_without_statistics() -> nn.Module:
    return Classifier(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False)), 8)


def convolutions() -> nn.Module:
    return Classifier(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, groups=1, padding_mode="reflect"),
            nn.GroupNorm(2, 8),
            nn.GELU(),
            nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.MaxPool2d(2),
            nn.PixelShuffle(2),
            nn.Upsample(scale_factor=0.5, mode="bilinear"),
        ),
        16,
    )


def flat(body: nn.Module, features: int) -> nn.Module:
    return Classifier(nn.Sequential(nn.Flatten(1, 2), body), features)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(12, 6), kind(6, 7, batch_first=True), nn.Linear(7, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(x))
        return F.cross_entropy(self.head(hidden[:, -1]), y)


def lstm_over_tokens() -> nn.Module:
    return Recurrent(nn.LSTM)


def gru_over_tokens() -> nn.Module:
    return Recurrent(nn.GRU)


class Packed(Recurrent):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        lengths = (x != 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), lengths, True, enforce_sorted=False)
        return F.cross_entropy(self.head(self.rnn(packed)[1][0][-1]), y)


def compiled_parts() -> nn.Module:
    """Compiling for a call would take the owner's machine minutes; workers run ops."""
    body = nn.Linear(6, 8)
    body.compile(backend=_never)  # what ``torch.compile(body)`` would be, without changing its names
    return Classifier(body, 8)


def _never(*_: object) -> Callable[..., object]:
    raise AssertionError("compiled")


def scripted_part() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # deprecated, and still met
        return Classifier(torch.jit.script(nn.Linear(6, 8)), 8)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x)
        attended, _ = self.attention(hidden, hidden, hidden)
        return F.cross_entropy(self.head(self.encoder(hidden + attended).mean(1)), y)


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Bilinear(6, 6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.mix(x, x.flip(1))), y)


def label_smoothing_and_class_weights() -> nn.Module:
    return Classifier(nn.Linear(6, 8), 8, label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 0.5, 1.5]))


class Alignments(nn.Module):
    """CTC over five frames."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(self.embed(x)).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logits, (y + 1)[:, None], (5,) * 4, (1,) * 4)


class ComplexWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.w = nn.Parameter(torch.randn(5, dtype=torch.cfloat))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.fft.irfft(torch.fft.rfft(self.a(x)) * self.w, n=8)
        return F.cross_entropy(self.head(torch.tanh(hidden)), y)


class RealSpectrum(ComplexWeight):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.a(x)) * torch.view_as_complex(self.w)
        return F.cross_entropy(self.head(torch.tanh(torch.fft.irfft(spectrum, n=8))), y)


class Correlated(RealSpectrum):
    """A product with a lazily conjugated tensor, parts of one, and layouts that are changed in place."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.a(x)) * torch.view_as_complex(self.w)
        hidden = torch.fft.irfft(spectrum * spectrum.conj(), n=8) + spectrum.conj().imag.sum(1, keepdim=True)
        turned = hidden.unsqueeze_(1).transpose_(0, 1).squeeze_(0).t_().swapaxes_(0, 1)
        return F.cross_entropy(self.head(torch.tanh(turned)), y)


class Decomposed(nn.Module):
    """Matrices as Gaussian processes and whitening use them, and a real spectrum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        square = h[:, :, None] * h[:, None] + torch.diag(torch.arange(2.0, 6.0))
        factor = torch.linalg.cholesky(square)
        solved = torch.cholesky_solve(h[..., None], factor) + torch.linalg.pinv(square) @ h[..., None]
        values = torch.linalg.eigvalsh(square) + torch.linalg.svdvals(square)
        more = (
            torch.cholesky_inverse(factor).sum(1)
            + torch.linalg.matrix_exp(square * 0.1).sum(1)
            + torch.renorm(h, 2, 0, 1.0)
        )
        rest = torch.fft.hfft(torch.fft.ihfft(h), n=4) + torch.special.gammaincc(torch.ones_like(h), h.exp())
        return F.cross_entropy(self.head(solved[..., 0] + values + more + rest), y)


def causal() -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(5)


class Encoder(nn.Module):
    """Torch's own encoder with a mask that it is given no hint about."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embedding, self.head = nn.Embedding(12, 8), nn.Linear(8, 4)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("mask", causal())

    def hidden(self, x: Tensor) -> Tensor:
        found = self.body(self.embedding(x), mask=self.mask)
        assert isinstance(found, Tensor)
        return found

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(x).mean(1)), y)


class Translator(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)  # type: ignore[assignment]

    def hidden(self, x: Tensor) -> Tensor:
        found = self.body(self.embedding(x), self.embedding(x.flip(1)), tgt_mask=causal())
        assert isinstance(found, Tensor)
        return found


class Densities(nn.Module):
    """Distributions of torch, with the checks of their arguments that they have by default."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(6, 8), nn.Parameter(torch.eye(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean, spread = self.a(x).chunk(2, 1)
        posterior = distributions.Normal(mean, F.softplus(spread) + 0.1)
        prior = distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        classes = distributions.Categorical(logits=mean)
        mixture = distributions.MixtureSameFamily(classes, posterior)
        joint = distributions.MultivariateNormal(mean[:, :3], scale_tril=self.scale.tril())
        likelihood = classes.log_prob(y) + mixture.log_prob(x[:, 0]) + joint.log_prob(x[:, :3])
        return distributions.kl_divergence(posterior, prior).mean() - likelihood.mean()


class Draws(Densities):
    def __init__(self, kind: type[distributions.Distribution]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = F.softplus(self.a(x)).chunk(2, 1)
        drawn: Tensor = self.kind(one, other).rsample()
        return drawn.mean()


class Counts(Classifier):
    """Asks for as many classes as there are among the labels."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.body(x)), F.one_hot(y).float())


CASES = [
    case(Decomposed, vectors),
    case(Correlated, vectors),
    case(Encoder, tokens),
    case(Translator, tokens),
    case(Densities, vectors),
    case(lambda: Draws(distributions.Gamma), vectors, name="gamma", refused="_standard_gamma.*LogNormal"),
    case(lambda: Draws(distributions.Beta), vectors, name="beta", refused="Beta.*Kumaraswamy"),
    case(
        lambda: Counts(nn.Linear(6, 8), 8), vectors, name="one_hot", refused=r"data-dep.*num_classes=\.\.\."
    ),
    case(weight_norm, vectors),
    case(orthogonal, vectors),
    case(orthogonal_columns, vectors),
    case(spectral_norm, vectors),
    case(spectral_norm_by_hooks, vectors),
    case(spectral_norm_of_convolutions, images),
    case(weight_norm_by_hooks, vectors),
    case(embedding_with_padding, tokens),
    case(sparse_embedding, tokens),
    case(sparse_embedding_bag, tokens),
    case(embedding_max_norm, tokens, refused=r"embedding_renorm_.*leave max_norm out of nn\.Embedding"),
    case(cumulative_batch_norm, vectors, steps=4),
    case(cumulative_batch_norm_of_images, images),
    case(Alignments, tokens, refused=r"F\.ctc_loss.*torch\.export cannot follow ctc_loss"),
    case(ComplexWeight, vectors, refused=r"parameter 'w' is complex64.*view_as_real"),
    case(embedding_bag, tokens),
    case(batch_norm, vectors),
    case(batch_norm_without_statistics, vectors),
    case(convolutions, images),
    case(lambda: flat(nn.LSTM(8, 6, 2, bidirectional=True, batch_first=True), 24 * 12), images, name="lstm"),
    case(lstm_over_tokens, tokens),
    case(gru_over_tokens, tokens),
    case(Attending, tokens),
    case(lambda: Packed(nn.LSTM), tokens, name="packed", refused="cannot follow packed sequences"),
    case(Bilinear, vectors),
    case(label_smoothing_and_class_weights, vectors),
    case(RealSpectrum, vectors),
    case(
        Bilinear,
        vectors,
        name="adamw with clipping",
        optimizer=Optimizer(OptimizerName.ADAMW, lr=1e-3, weight_decay=0.1, clip_norm=0.5),
    ),
]


@pytest.mark.parametrize("kind", sampled(22, CASES))
def test_a_stock_layer_trains_as_in_a_plain_loop(kind: Case, one_thread: None) -> None:
    run(kind)


def test_a_part_that_is_compiled_by_torch_jit_is_refused() -> None:
    with pytest.raises(AtollError, match="'body' of the module is compiled"):
        job_of(scripted_part(), vectors())


def test_compiled_parts_are_captured_as_written() -> None:
    prepare(job_of(compiled_parts(), vectors()))


def test_another_default_type_of_torch_is_refused() -> None:
    """On a worker the same ops would make tensors of other types."""
    torch.set_default_dtype(torch.float64)
    try:
        words = refusal(lambda: job_of(batch_norm().float(), vectors()))
    finally:
        torch.set_default_dtype(torch.float32)
    assert "torch's default type is torch.float64" in words


def test_distributions_check_their_arguments_again_after_a_capture() -> None:
    """As their owner has set it: the check is left out of a graph alone."""
    distributions.Distribution.set_default_validate_args(True)  # torch.compile ends it for a whole process
    prepare(job_of(Densities(), vectors()))
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        distributions.Normal(0.0, -1.0)
