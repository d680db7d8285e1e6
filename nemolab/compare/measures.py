"""How far apart two models' logits are: perplexity, KL divergence, agreement, greedy matches.

Every figure here is in nats, summed in float64 over the full vocabulary, with the reference first:
KL(reference || engine). The two sets of logits are keyword arguments, so that they cannot change places unseen.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from nemolab.errors import NemolabError

# KL is never negative; float64 sums over a vocabulary of 131,072 stay far above this.
NEGATIVE_KL_NATS = -1e-9
# Rows of logits worked on at once: 64 rows x 131,072 tokens x 8 bytes x 3 temporaries = 200 MB.
ROWS_AT_ONCE = 64

LogitRows = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class Worst:
    """The position with the largest KL: its row, the token read there, and its text when a tokenizer is at hand."""

    kl: float
    position: int
    token_id: int
    token: str | None


@dataclass(frozen=True)
class Divergence:
    """KL(reference || engine) over a stretch of positions, in nats, and the share of equal first choices."""

    tokens: int
    mean: float
    median: float
    p95: float
    p99: float
    max: float
    worst: Worst
    top1_agreement: float

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood; `tokens` were scored, each but the first of the text once."""

    tokens: int
    engine: float
    reference: float
    # Standard error of log(ppl_engine / ppl_reference), from the paired differences.
    log_ratio_error: float


@dataclass(frozen=True)
class Mismatch:
    """A place where the engine's greedy token is not the reference's first choice.

    gap        reference's best logit minus its logit of the engine's token
    bf16_step  spacing of bfloat16 numbers at the best logit; a smaller gap is a tie that BF16 could not tell apart
    """

    step: int
    engine_token: int
    reference_token: int
    gap: float
    bf16_step: float
    tie: bool


@dataclass(frozen=True)
class Greedy:
    """How many of the engine's greedy tokens the reference would have written too, given the same past."""

    match: int
    of: int
    mismatches: tuple[Mismatch, ...]


@dataclass(frozen=True)
class SelfCheck:
    """A model against itself: one pass over a stretch, and the same tokens one at a time."""

    tokens: int
    kl_mean: float
    kl_max: float
    largest_logit_difference: float


def check_logits(logits: torch.Tensor, whose: str) -> torch.Tensor:
    """Refuse what cannot be a row of logits: NaN, +inf, or a row of probabilities.

    logits  [rows, vocabulary]
    Raises NemolabError that names whose logits and the first bad row.
    """
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise NemolabError(f"{whose}: logits of shape {tuple(logits.shape)}, needed [rows, vocabulary of 2 or more]")
    bad = torch.isnan(logits).any(1) | torch.isposinf(logits).any(1) | torch.isneginf(logits).all(1)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise NemolabError(f"{whose}: logits of row {row} hold NaN or infinity, so no probability can be formed")
    if logits.shape[0]:
        sums = logits.double().sum(1)
        if bool((logits >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all()):
            raise NemolabError(f"{whose}: every row is positive and sums to 1: probabilities came, logits are needed")
    return logits


def kl_rows(*, reference: torch.Tensor, engine: torch.Tensor) -> torch.Tensor:
    """KL(reference || engine) of each row, in nats.

    reference, engine  [rows, vocabulary] logits of any float type; worked on in float64
    returns            [rows] float64

    Raises NemolabError for differing shapes, NaN, or a KL below -1e-9 (no rounding explains one).
    """
    if reference.shape != engine.shape:
        raise NemolabError(f"logits differ in shape: reference {tuple(reference.shape)}, engine {tuple(engine.shape)}")
    p = torch.log_softmax(check_logits(reference, "reference").double(), dim=1)
    q = torch.log_softmax(check_logits(engine, "engine").double(), dim=1)
    # A token the reference holds impossible adds nothing, even where both say -inf (inf - inf is NaN).
    terms = torch.where(torch.isneginf(p), torch.zeros_like(p), p.exp() * (p - q))
    kl = terms.sum(1)
    if kl.numel() and float(kl.min()) < NEGATIVE_KL_NATS:
        row = int(kl.argmin())
        raise NemolabError(
            f"KL of row {row} is {float(kl.min()):.3e} nats; it cannot be negative: the measure is broken"
        )
    return kl


def diverge(
    ids: list[int],
    *,
    reference: LogitRows,
    engine: LogitRows,
    rows: range,
    token_text: Callable[[list[int]], str] | None = None,
) -> Divergence:
    """KL and first-choice agreement over the positions `rows` of a text, a few rows of logits at a time.

    ids        the text; row t is the prediction made after reading ids[t]
    reference  callable (start, stop) -> logits [stop - start, vocabulary]; engine likewise
    """
    kls, agreed = [], 0
    for start in range(rows.start, rows.stop, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, rows.stop)
        theirs, ours = reference(start, stop), engine(start, stop)
        kls.append(kl_rows(reference=theirs, engine=ours))
        agreed += int((theirs.argmax(1) == ours.argmax(1)).sum())
    if not kls:
        raise NemolabError(f"no positions to compare: rows {rows.start}..{rows.stop} of a text of {len(ids)} tokens")
    kl = torch.cat(kls)
    at = int(kl.argmax())
    position = rows.start + at
    worst = Worst(float(kl[at]), position, ids[position], token_text([ids[position]]) if token_text else None)
    return Divergence(
        tokens=len(kl),
        mean=float(kl.mean()),
        median=float(kl.median()),
        p95=float(torch.quantile(kl, 0.95)),
        p99=float(torch.quantile(kl, 0.99)),
        max=float(kl[at]),
        worst=worst,
        top1_agreement=agreed / len(kl),
    )


def check_self(*, one_pass: torch.Tensor, token_by_token: torch.Tensor) -> SelfCheck:
    """How far one pass lies from token by token, both [tokens, vocabulary] of one model."""
    kl = torch.cat(
        [
            kl_rows(reference=whole, engine=steps)
            for whole, steps in zip(one_pass.split(ROWS_AT_ONCE), token_by_token.split(ROWS_AT_ONCE), strict=True)
        ]
    )
    difference = float((one_pass - token_by_token).abs().max())
    return SelfCheck(len(kl), float(kl.mean()), float(kl.max()), difference)


def negative_log_likelihoods(ids: list[int], logits: LogitRows) -> torch.Tensor:
    """-log p(ids[t + 1] | ids[..t]) for each token but the first, in nats, [len(ids) - 1] float64."""
    parts = []
    for start in range(0, len(ids) - 1, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, len(ids) - 1)
        p = torch.log_softmax(logits(start, stop).double(), dim=1)
        parts.append(-p.gather(1, torch.tensor(ids[start + 1 : stop + 1])[:, None])[:, 0])
    if not parts:
        raise NemolabError(f"a text of {len(ids)} token(s) has nothing to score: two or more are needed")
    return torch.cat(parts)


def score(ids: list[int], *, reference: LogitRows, engine: LogitRows) -> Perplexity:
    """Perplexity of the same ids under both models; no token is put in front of the text."""
    ours = negative_log_likelihoods(ids, engine)
    theirs = negative_log_likelihoods(ids, reference)
    difference = ours - theirs
    error = float(difference.std(correction=1)) / math.sqrt(len(difference)) if len(difference) > 1 else 0.0
    return Perplexity(len(ours), exp(float(ours.mean())), exp(float(theirs.mean())), error)


def exp(nats: float) -> float:
    """exp that says infinity where math.exp would raise: a broken model may lie past e^709."""
    return math.exp(nats) if nats < 709 else math.inf


def bf16_step(value: float) -> float:
    """Spacing of bfloat16 numbers at `value`: 8 bits of significand, so 2^-7 of its power of two."""
    return 2.0 ** (math.floor(math.log2(abs(value))) - 7) if value else 2.0**-133


def score_greedy(written: list[int], reference: torch.Tensor) -> Greedy:
    """Hold the engine's greedy tokens against the reference's first choices after the same past.

    written    tokens the engine chose, one a step
    reference  [len(written), vocabulary] the reference's logits where each was chosen
    """
    if len(written) != len(reference):
        raise NemolabError(f"{len(written)} tokens were written, but the reference scored {len(reference)}")
    mismatches = []
    for step, (token, logits) in enumerate(zip(written, reference, strict=True)):
        best = int(logits.argmax())
        if best == token:
            continue
        gap, spacing = float(logits[best] - logits[token]), bf16_step(float(logits[best]))
        mismatches.append(Mismatch(step, token, best, gap, spacing, tie=gap < spacing))
    return Greedy(len(written) - len(mismatches), len(written), tuple(mismatches))
