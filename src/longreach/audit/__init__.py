"""Measures what a reward function pays for: exploits, honest work, and harm to its neighbours.

``longreach.audit.audit(reward)`` runs any function with TRL's signature, in a process of its own, on a versioned corpus
of tasks with honest solutions, wrong ones and exploits, and returns a result card. `docs/audit.md` specifies all of it.
Nothing here imports torch or the rest of the package.
"""

from longreach.audit.adapters import from_inspect, from_verifiers, from_verifiers_task
from longreach.audit.card import Card
from longreach.audit.loader import load_corpus, private_split
from longreach.audit.manifest import CorpusError, seal
from longreach.audit.proof import ProofError, verify
from longreach.audit.schema import Corpus
from longreach.audit.score import audit
from longreach.audit.target import TargetError

__all__ = [
    "Card",
    "Corpus",
    "CorpusError",
    "ProofError",
    "TargetError",
    "audit",
    "from_inspect",
    "from_verifiers",
    "from_verifiers_task",
    "load_corpus",
    "private_split",
    "seal",
    "verify",
]
