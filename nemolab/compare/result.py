"""The document a comparison hands back: figures, how they were taken, and what is wrong in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from nemolab.compare.determinism import Determinism
from nemolab.compare.measures import Divergence, Greedy, Perplexity, SelfCheck
from nemolab.compare.texts import Text


@dataclass(frozen=True)
class Bounds:
    """What has to hold, in nats of mean KL.

    engine_self_check  as self_check, where another bound holds for the engine
    same_greedy        whether greedy tokens must agree where the reference sees no tie
    """

    kl_mean: float
    self_check: float
    control: float
    engine_self_check: float | None = None
    same_greedy: bool = True


@dataclass(frozen=True)
class TextResult:
    """All figures of one text.

    beside_cpu  of an engine on a card: how far it lies from the CPU's engine, in the prompt pass and in decode
    """

    text: Text
    perplexity: Perplexity
    prompt: Divergence
    decode: Divergence
    greedy: Greedy
    closest_routing_gap: float
    beside_cpu: tuple[Divergence, Divergence] | None = None

    def to_dict(self) -> dict:
        return {
            "name": self.text.name,
            "tokens": self.perplexity.tokens,
            "ppl_engine": self.perplexity.engine,
            "ppl_reference": self.perplexity.reference,
            "ppl_log_ratio_error": self.perplexity.log_ratio_error,
            **_spell(self.prompt, ""),
            **_spell(self.decode, "_decode"),
            **(_spell(self.beside_cpu[0], "_beside_cpu") if self.beside_cpu else {}),
            **(_spell(self.beside_cpu[1], "_decode_beside_cpu") if self.beside_cpu else {}),
            "tokens_decode": self.decode.tokens,
            "greedy_match": self.greedy.match,
            "greedy_of": self.greedy.of,
            "greedy_mismatches": [asdict(mismatch) for mismatch in self.greedy.mismatches],
            "closest_routing_gap": self.closest_routing_gap,
            "text_tokens": self.text.whole_tokens,
            "first_id": self.text.ids[0],
            "bos_added": False,
            "ids_sha256": self.text.ids_sha256,
        }


def _spell(kl: Divergence, suffix: str) -> dict:
    """kl_mean, kl_max ... for the prompt pass, kl_mean_decode ... for decode."""
    return {
        f"kl_mean{suffix}": kl.mean,
        f"kl_median{suffix}": kl.median,
        f"kl_p95{suffix}": kl.p95,
        f"kl_p99{suffix}": kl.p99,
        f"kl_max{suffix}": kl.max,
        f"kl_max_at{suffix}": asdict(kl.worst),
        f"top1_agreement{suffix}": kl.top1_agreement,
    }


@dataclass(frozen=True)
class Result:
    """Everything one comparison found."""

    texts: list[TextResult]
    controls: list[dict]
    determinism: Determinism
    self_checks: dict[str, SelfCheck]
    bounds: Bounds
    reference: dict
    about: dict
    seconds: dict[str, float]

    def problems(self) -> list[str]:
        """What does not hold, one line each; empty when the engine passed."""
        bounds, found = self.bounds, []
        for whose, check in self.self_checks.items():
            own = bounds.engine_self_check if whose == "engine" else None
            bound = bounds.self_check if own is None else own
            if not check.kl_mean <= bound:
                found.append(
                    f"the {whose} disagrees with itself: one pass and token by token lie {check.kl_mean:.3g} nats apart"
                    f" over {check.tokens} tokens (bound {bound:g}), so no KL against it can be believed"
                )
        for result in self.texts:
            name = result.text.name
            measured = [("", "prompt pass", result.prompt), ("", "decode", result.decode)]
            if result.beside_cpu:
                whose = " from the engine on the CPU"
                measured += [(whose, "prompt pass", result.beside_cpu[0]), (whose, "decode", result.beside_cpu[1])]
            for whose, where, kl in measured:
                if not kl.mean <= bounds.kl_mean:
                    found.append(
                        f"text {name}: mean KL{whose} in the {where} is {kl.mean:.3g} nats, above {bounds.kl_mean:g};"
                        f" worst at position {kl.worst.position} ({kl.worst.kl:.3g})"
                    )
            real = [mismatch for mismatch in result.greedy.mismatches if not mismatch.tie]
            if real and bounds.same_greedy:
                found.append(
                    f"text {name}: {len(real)} greedy token(s) differ where the reference sees no tie;"
                    f" first at step {real[0].step}, {real[0].gap:.3g} apart"
                )
        for control in self.controls:
            if not control["failed_as_it_must"]:
                found.append(
                    f"control {control['name']!r} did not fail: mean KL {control['kl_mean_least']:.3g} on one text,"
                    f" {bounds.control:g} was expected on all; the measure cannot tell a broken model here"
                )
        if not self.determinism.deterministic:
            found.append("repeats differ in their bits: " + ", ".join(self.determinism.groups()))
        return found

    def to_dict(self) -> dict:
        problems = self.problems()
        return {
            "texts": [text.to_dict() for text in self.texts],
            "controls": self.controls,
            "deterministic": self.determinism.deterministic,
            "passed": not problems,
            "problems": problems,
            "kl": "KL(reference || engine) in nats over the full vocabulary, float64",
            "bounds": asdict(self.bounds),
            "self_checks": {whose: asdict(check) for whose, check in self.self_checks.items()},
            "determinism": self.determinism.to_dict(),
            "reference": self.reference,
            "seconds": self.seconds,
            **self.about,
        }
