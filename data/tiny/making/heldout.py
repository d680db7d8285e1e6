"""Which documents are held out of the training text: one in sixty, chosen by a hash of their beginning."""

import hashlib


def is_held_out(document: str) -> bool:
    return int(hashlib.md5(document[:200].encode()).hexdigest(), 16) % 60 == 0
