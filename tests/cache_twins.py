"""Every cache policy in its plainest form: lists searched and sorted, the rules of a batch as they are written down.

Slow on purpose, and written apart from `nemolab.policy`: the compiled decisions are held against these.
"""

import math


class Twin:
    """The rules that all policies share. `lowest` names the victim among candidates; the rest is bookkeeping."""

    forced = True
    foresees = False  # a batch that alone exceeds the budget loses its own oldest; else those the policy chooses
    evicts_first = False  # classical descriptions make room before a miss enters; the victims are the same

    def __init__(self, capacity, size_of, future=()):
        self.capacity, self.size_of, self.future = capacity, size_of, future
        self.held, self.spared, self.unused = [], set(), set()  # held: by entry
        self.entered, self.wasted, self.now = set(), 0, 0
        self.begin()

    def used(self):
        return sum(self.size_of[key] for key in self.held)

    def leave(self, key):
        self.held.remove(key)
        self.wasted += key in self.unused
        self.unused.discard(key)
        self.left(key)

    def evict(self, incoming, spared):
        victims = []
        while self.used() + incoming > self.capacity:
            candidates = [key for key in self.held if key not in spared]
            victim = self.lowest(candidates) if candidates else None
            if victim is None:
                break
            self.leave(victim)
            victims.append(victim)
        return victims

    def batch(self, keys, number):
        """Returns (missed keys, first misses, useful keys, victims)."""
        keys = list(dict.fromkeys(reversed(keys)))[::-1]
        self.now = number
        missed = [key for key in keys if key not in self.held]
        first = [key for key in missed if key not in self.entered]
        useful = [key for key in keys if key in self.unused]
        self.unused -= set(useful)
        self.entered |= set(missed)
        self.spared = set(keys)
        for key in keys:
            self.meet(key)
        victims = []
        if self.evicts_first:
            victims += self.evict(sum(self.size_of[key] for key in missed), self.spared)
        for key in keys:
            if key in missed:
                if self.admits(key):
                    self.held.append(key)
                    self.enter(key)
            else:
                self.hit(key)
        victims += self.evict(0, self.spared if self.forced else ())
        if self.foresees:
            victims += self.evict(0, ())
        for key in keys:
            if self.used() > self.capacity and key in self.held:
                self.leave(key)
                victims.append(key)
        return missed, first, useful, victims

    def prompt(self, keys, number):
        keys = list(dict.fromkeys(reversed(keys)))[::-1]
        self.now = number
        missed = [key for key in keys if key not in self.held]
        useful = [key for key in keys if key in self.unused]
        self.unused -= set(useful)
        return missed, [key for key in missed if key not in self.entered], useful, []

    def prefetch(self, guesses):
        """Returns the keys read."""
        read = []
        for key in [guess for guess in dict.fromkeys(guesses) if guess not in self.held]:
            spared = {other for other in self.spared if other in self.held}
            if sum(self.size_of[other] for other in spared) + self.size_of[key] > self.capacity or not self.admits(key):
                continue
            self.evict(self.size_of[key], self.spared)
            if self.used() + self.size_of[key] > self.capacity:
                continue
            self.held.append(key)
            self.spared.add(key)
            self.entered.add(key)
            self.unused.add(key)
            self.ahead(key)
            read.append(key)
        return read

    # What a policy fills in.
    def begin(self): ...
    def meet(self, key): ...
    def hit(self, key): ...
    def enter(self, key): ...
    def left(self, key): ...
    def ahead(self, key):
        self.enter(key)

    def admits(self, key):
        return True

    def lowest(self, candidates):
        return min(candidates, key=self.rank)


class Recency(Twin):
    def begin(self):
        self.clock, self.when = 0, {}

    def enter(self, key):
        self.clock += 1
        self.when[key] = self.clock

    hit = enter

    def rank(self, key):
        return self.when[key]


class LFU(Recency):
    def begin(self):
        super().begin()
        self.count = {}

    def enter(self, key):
        super().enter(key)
        self.count[key] = self.count.get(key, 0) + 1

    hit = enter

    def ahead(self, key):
        Recency.enter(self, key)

    def rank(self, key):
        return self.count.get(key, 0), self.when[key]


class LFUInCache(LFU):
    def left(self, key):
        self.count[key] = 0


class LFUAgeing(LFUInCache):
    def begin(self):
        super().begin()
        self.age, self.weight = 0, {}

    def enter(self, key):
        super().enter(key)
        self.weight[key] = self.count[key] + self.age

    hit = enter

    def ahead(self, key):
        super().ahead(key)
        self.weight[key] = self.count.get(key, 0) + self.age

    def rank(self, key):
        return self.weight[key], self.when[key]

    def lowest(self, candidates):
        victim = super().lowest(candidates)
        self.age = self.weight[victim]
        return victim

    evicts_first = True  # the age must be known when newcomers are weighed


class Belady(Recency):
    foresees = True

    def rank(self, key):
        uses = [number for number, keys in enumerate(self.future) if number > self.now and key in keys]
        return -min(uses, default=math.inf), self.when[key]


class BeladyBypass(Belady):
    forced = False


class Static(Twin):
    def begin(self):
        counts = {}
        for keys in self.future:
            for key in set(keys):
                counts[key] = counts.get(key, 0) + 1
        self.hot, free = set(), self.capacity
        for key in sorted(counts, key=lambda key: (-counts[key], key)):
            if self.size_of[key] <= free:
                self.hot.add(key)
                free -= self.size_of[key]

    def admits(self, key):
        return key in self.hot

    def lowest(self, candidates):
        return None


class Sieve(Twin):
    evicts_first = True

    def begin(self):
        self.visited, self.hand = set(), None  # hand: the key to look at next

    def hit(self, key): ...
    def meet(self, key):
        if key in self.held:
            self.visited.add(key)

    def left(self, key):
        self.visited.discard(key)

    def lowest(self, candidates):
        at = self.held.index(self.hand) if self.hand in self.held else 0
        while True:
            key = self.held[at]
            if key in candidates:
                if key not in self.visited:
                    self.hand = self.held[at + 1] if at + 1 < len(self.held) else None
                    return key
                self.visited.discard(key)
            at = (at + 1) % len(self.held)

    def leave(self, key):
        if key == self.hand:
            at = self.held.index(key)
            self.hand = self.held[at + 1] if at + 1 < len(self.held) else None
        super().leave(key)


class SLRU(Twin):
    evicts_first = True

    def begin(self):
        self.lists = [[], [], [], []]

    def bytes_in(self, number):
        return sum(self.size_of[key] for key in self.lists[number])

    def hit(self, key):
        at = next(number for number, keys in enumerate(self.lists) if key in keys)
        self.lists[at].remove(key)
        at = min(at + 1, 3)
        self.lists[at].append(key)
        for number in range(at, 0, -1):
            while self.bytes_in(number) > self.capacity // 4:
                self.lists[number - 1].append(self.lists[number].pop(0))

    def enter(self, key):
        room = [n for n in range(4) if self.bytes_in(n) + self.size_of[key] <= self.capacity // 4]
        self.lists[room[0] if room else 0].append(key)

    def left(self, key):
        for keys in self.lists:
            if key in keys:
                keys.remove(key)

    def lowest(self, candidates):
        return next(key for keys in self.lists for key in keys if key in candidates)


class S3FIFO(Twin):
    evicts_first = True

    def begin(self):
        self.small, self.main, self.ghost, self.uses, self.evicted = [], [], [], {}, False
        self.small_limit, self.ghost_limit = int(self.capacity * 0.1), int(self.capacity * 0.9)
        self.remembered = set()

    def total(self, keys):
        return sum(self.size_of[key] for key in keys)

    def meet(self, key):
        if key in self.held:
            self.uses[key] += 1
        elif key in self.ghost:
            self.ghost.remove(key)
            self.remembered.add(key)

    def enter(self, key):
        if key in self.ghost:
            self.ghost.remove(key)
            self.remembered.add(key)
        full = not self.evicted and self.total(self.small) >= self.small_limit
        (self.main if key in self.remembered or full else self.small).append(key)
        self.remembered.discard(key)
        self.uses[key] = 0

    def left(self, key):
        if key in self.main:
            self.main.remove(key)
            return
        self.small.remove(key)
        if self.size_of[key] <= self.ghost_limit:
            self.ghost.append(key)
            while self.total(self.ghost) > self.ghost_limit:
                self.ghost.pop(0)

    def lowest(self, candidates):
        self.evicted = True
        in_main = self.total(self.main) > self.capacity - self.small_limit or not self.small
        while True:
            queue = [key for key in (self.main if in_main else self.small) if key in candidates]
            if not queue:
                in_main = not in_main
                continue
            key = queue[0]
            if self.uses[key] < (1 if in_main else 2):
                return key
            (self.main if in_main else self.small).remove(key)
            self.main.append(key)
            self.uses[key] = min(self.uses[key], 3) - 1 if in_main else 0


class ARC(Twin):
    evicts_first = True

    def begin(self):
        self.once, self.again, self.once_ghost, self.again_ghost = [], [], [], []
        self.target, self.from_again, self.remembered = 0.0, False, set()

    def total(self, keys):
        return sum(self.size_of[key] for key in keys)

    def meet(self, key):
        ghosts = self.total(self.once_ghost), self.total(self.again_ghost)
        if key in self.held:
            return
        if key in self.once_ghost:
            self.target = min(self.target + max(ghosts[1] / ghosts[0], 1) * self.size_of[key], self.capacity)
        elif key in self.again_ghost:
            self.target = max(self.target - max(ghosts[0] / ghosts[1], 1) * self.size_of[key], 0)
            self.from_again = True
        self.recall(key)

    def recall(self, key):
        for ghost in (self.once_ghost, self.again_ghost):
            if key in ghost:
                ghost.remove(key)
                self.remembered.add(key)

    def hit(self, key):
        self.from_again = False
        (self.once if key in self.once else self.again).remove(key)
        self.again.append(key)

    def enter(self, key):
        self.from_again = False
        self.recall(key)
        (self.again if key in self.remembered else self.once).append(key)
        self.remembered.discard(key)
        while self.once_ghost and self.total(self.once + self.once_ghost) > self.capacity:
            self.once_ghost.pop(0)
        everything = self.once, self.again, self.once_ghost, self.again_ghost
        while self.again_ghost and sum(map(self.total, everything)) > 2 * self.capacity:
            self.again_ghost.pop(0)

    def left(self, key):
        if key in self.once:
            self.once.remove(key)
            self.once_ghost.append(key)
        else:
            self.again.remove(key)
            self.again_ghost.append(key)

    def lowest(self, candidates):
        once = next((key for key in self.once if key in candidates), None)
        again = next((key for key in self.again if key in candidates), None)
        if once is None or again is None:
            return again if once is None else once
        held = self.total(self.once)
        return once if held > self.target or (held == self.target and self.from_again) else again


TWINS = {
    "lru": Recency,
    "lfu": LFU,
    "lfu-incache": LFUInCache,
    "lfu-ageing": LFUAgeing,
    "slru": SLRU,
    "s3fifo": S3FIFO,
    "sieve": Sieve,
    "arc": ARC,
    "static": Static,
    "belady": Belady,
    "belady-bypass": BeladyBypass,
}
