"""A source that knows what plain decoding wrote, and hides it among wrong tokens.

Whether a bundle's own proposals come true depends on its head and on the text. This one's always do, in part: so in
every pass rows are accepted and dropped, caches are closed up, and branches run beside each other.
"""

import random
from collections.abc import Sequence

from wavekit.decoding.decoder import Decoder
from wavekit.decoding.sampling import Sampler, SamplingParams, SeenTokens
from wavekit.decoding.sequence_workers import SequenceWorkers
from wavekit.decoding.sources import ANCHOR, Candidates, Source
from wavekit.decoding.speculation import Silence
from wavekit.decoding.speculator import Speculator
from wavekit.verification.tolerances import rounds
from wavekit_engines.engine import Array

_DEPTH, _WRONG_SIBLINGS = 6, 3


class KnownText:
    """Proposes the next tokens of a text, up to a depth that is drawn anew each time, each among wrong siblings."""

    def __init__(self, text: Sequence[int], vocab_size: int, chain: bool) -> None:
        """With ``chain`` there are no siblings, and now and then the last token is wrong."""
        self._text, self._vocab_size, self._chain = text, vocab_size, chain
        self._draw = random.Random(len(text))

    def follow(self, text: Sequence[int]) -> None:
        """See `sources.Source`."""

    def propose(self, candidates: Candidates, text: Sequence[int]) -> Silence | None:
        """See `sources.Source`."""
        parent, chance = ANCHOR, 1.0
        most = self._draw.randint(1, _DEPTH)
        for token in self._text[len(text) : len(text) + min(most, candidates.depth)]:
            chance *= 0.9
            siblings = [token] if self._chain else [token, *(self._wrong() for _ in range(_WRONG_SIBLINGS))]
            self._draw.shuffle(siblings)
            numbers = {sibling: candidates.add(parent, sibling, chance) for sibling in siblings}
            parent = numbers[token]
        if self._chain and parent != ANCHOR:
            candidates.add(parent, self._wrong(), 0.9 * chance)
        return None if len(candidates) else "no match"

    def skip(self, text: Sequence[int]) -> None:
        """See `sources.Source`."""

    def learn(self, committed: Sequence[int]) -> None:
        """See `sources.Source`."""

    def _wrong(self) -> int:
        return self._draw.randrange(self._vocab_size)


def written_knowing(decoder: Decoder, prompt: Sequence[int], text: Sequence[int], params: SamplingParams) -> list[int]:
    """The text written after ``prompt`` where a source knows that it was ``text``."""
    source = KnownText([*prompt, *text], decoder.spec.vocab_size, chain=rounds(decoder.manifest.engine))
    return _written(decoder, prompt, len(text), params, [source])


def written_in_pairs(decoder: Decoder, prompt: Sequence[int], count: int, params: SamplingParams) -> list[int]:
    """The ``count`` tokens written where nothing is proposed but passes have the rows that they have with proposals.

    Engines that round activations give other numbers for a pass of one row than for passes of several, which agree.
    """
    return _written(decoder, prompt, count, params, [])


def _written(
    decoder: Decoder, prompt: Sequence[int], count: int, params: SamplingParams, sources: list[Source]
) -> list[int]:
    sampler, context = Sampler(params, decoder.spec.vocab_size), SeenTokens()
    context.add(prompt)

    def choose(logits: Array, position: int) -> int:
        token = sampler.choose(logits, position, context)
        context.add((token,))
        return token

    def make(workers: SequenceWorkers) -> Speculator:
        return Speculator(sources, chain=rounds(decoder.manifest.engine))

    ticks = decoder.decode(prompt, None if params.is_argmax else choose, count, None, make)
    return [token for committed in ticks for token in committed]
