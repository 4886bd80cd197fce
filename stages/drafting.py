"""The drafter's model: the target with substitutes in place of its matrices, where it has them.

Other matrices, norms, embedding rows and committed KV are the target's own. It runs a few
nodes of a tree at a time and adds their children to it (growth.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from routing.messages import Sampling
from stages.draft_stack import DraftStack
from stages.embedding import Embedding
from stages.growth import BRANCH, Growth
from stages.kv import DraftScratch, KVStore
from stages.noise import Noise
from stages.outlook import of_scores
from stages.rope import Rope
from stages.sampling import SHORTLIST, Scorer
from stages.shapes import ModelShape
from stages.skeleton import Skeleton
from stages.stalls import Stalls
from stages.weights import Weights


class DraftModel:
    """Runs the nodes of draft trees. Used from the drafter's stream only.

    Takes a skeleton of its own (its linears are replaced) and shares weights, KV and embedding.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        weights: Weights,
        shape: ModelShape,
        rope: Rope,
        embedding: Embedding,
        kv: KVStore,
        scratch: DraftScratch,
        noise: Noise,
    ) -> None:
        assert weights.form is not None
        self._skeleton, self._embedding, self._scratch = skeleton, embedding, scratch
        self.form = weights.form
        """That of its substitutes."""
        skeleton.bind({n: t for n, t in weights.resident.items() if n in skeleton})
        self._stack = DraftStack(skeleton, weights, shape, rope, kv, scratch)
        self._head = weights.product(shape.head.name)
        compiled = weights.compiled(shape.head.name)
        self._kernel = compiled if skeleton.dtype is torch.float32 else None
        self._logits = torch.empty(0, shape.vocab)
        self._noise, self._vocab = noise, shape.vocab
        self.step_s = 0.0
        self._stalls = Stalls()

    @property
    def rows(self) -> int:
        """The most nodes of a tree that may be run."""
        return self._scratch.rows

    def scorer(self, sampling: Sampling, prompt: int) -> Scorer:
        """What scores a request's tokens; `prompt` is the number of its prompt's."""
        return Scorer(sampling, prompt, self._noise, self._vocab, shortlist=SHORTLIST)

    def keep(self, rows: Sequence[int]) -> None:
        """Move draft scratch rows (rising) to the front; see Growth.rerooted."""
        self._scratch.keep(rows)

    def run(
        self,
        place: int,
        growth: Growth,
        nodes: Sequence[int],
        scorer: Scorer,
        history: Sequence[int],
        sharpening: float,
    ) -> None:
        """Run `nodes` of `growth`, whose parents were run (or are in front of them), and add
        their children to it. history: the session's tokens up to the root, where `scorer` looks
        back; sharpening: the temperature of the scores."""
        began = time.perf_counter()
        if self._stalls.narrow:
            torch.set_num_threads(1)  # for this call: each begins with the width that it claimed
        seen = growth.begin(nodes)
        positions = [growth.position + growth.depths[node] for node in growth.order]
        hidden = self._embedding.rows([growth.tokens[node] for node in nodes])
        hidden = self._stack.run(hidden, place, growth.position, seen, torch.tensor(positions))
        logits = self._skeleton.architecture.finish(self._scored(self._skeleton.finish(hidden)))
        # The noise is the verifier's own: what it will choose is likely what leads here.
        histories = [(*history, *growth.path(node)) for node in nodes] if history else ()
        after = [position + 1 for position in positions[-len(nodes) :]]
        scores = scorer.scores(logits.float(), histories, after)
        growth.see(nodes, of_scores(scores, sharpening, BRANCH))
        self.step_s = time.perf_counter() - began
        self._stalls.see(len(nodes), self.step_s)

    def _scored(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (rows, hidden) -> logits (rows, vocab), good until the next call."""
        rows = hidden.shape[0]
        if self._kernel is None:
            return self._head(hidden)
        if len(self._logits) < rows:
            self._logits = torch.empty(rows, self._vocab)
        return self._kernel.matmul(hidden, self._logits[:rows])
