"""Repacks that are killed, for tests/test_kills.py: one process that has imported everything forks them by the dozen.

    python kills.py SOURCE FOLDER SEED MORE

Storms  repack calls   a repack dies before, after and half-way through each kind of system call that it makes
        ensure calls   the same of a store made on the way, at a few calls
        repack delays  killed again and again after random delays, by SIGKILL, SIGTERM or SIGHUP, until one gets through
MORE    0 for the short ones; further calls and rounds, at random, for long ones
Prints {storm: {"kills", "resumed_blocks", "problems", "calls"}} as JSON. A problem is whatever looked finished and was
not, or a rerun that failed or ended with other bytes than an undisturbed run.
"""

import builtins
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

from nemolab.errors import StoreError
from nemolab.store import Store, ensure_store, repack

CALLS = (
    "open", "mkdir", "replace", "unlink", "fsync", "ftruncate", "posix_fallocate", "pwrite", "pwritev", "write",
)  # fmt: skip
WRITES = ("pwrite", "pwritev", "write")  # those that can die half-way
FEW_POINTS, FEW_ROUNDS = 5, 3


def quiet(line):
    pass


def run_repack(source, folder):
    return repack(source, folder, announce=quiet)


def run_ensure(source, folder):
    os.environ["NEMOLAB_CACHE"] = str(folder)
    ensure_store(source, announce=quiet)
    return None


JOBS = {"repack": run_repack, "ensure": run_ensure}


def find_store(job, folder):
    """The folder of the store, or None where there is none yet."""
    if job == "repack":
        return folder if folder.exists() else None
    found = [path for path in (folder / "stores").glob("*") if path.is_dir()]
    return found[0] if found else None


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def forked(work):
    """Start `work` in a child; returns its process id and a pipe that gives what it answered, as JSON."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        return child, ours
    code = 1
    try:
        os.close(ours)
        os.write(theirs, json.dumps(work()).encode())
        code = 0
    except BaseException:
        os.write(theirs, json.dumps({"failed": traceback.format_exc()}).encode())
    finally:
        os._exit(code)


def outcome(child, pipe):
    _, status = os.waitpid(child, 0)
    with open(pipe, "rb") as answer:
        raw = answer.read()
    return os.waitstatus_to_exitcode(status), json.loads(raw) if raw else None


def die_at(point, how):
    """Count the calls; at number `point` die: before the call, after it, or with half of what it writes written."""
    made = []

    def patched(name, real):
        def call(*arguments, **named):
            made.append(name)
            if len(made) != point:
                return real(*arguments, **named)
            if how == "half" and name in WRITES:
                data = arguments[1][0] if name == "pwritev" else arguments[1]
                half = memoryview(data)[: memoryview(data).nbytes // 2 // 4096 * 4096 or memoryview(data).nbytes // 2]
                real(arguments[0], [half] if name == "pwritev" else half, *arguments[2:])
            elif how == "after":
                real(*arguments, **named)
            os.kill(os.getpid(), signal.SIGKILL)

        return call

    os.fsync = lambda descriptor: None  # a killed process loses nothing that the kernel has, and waiting takes minutes
    for name in CALLS:
        setattr(os, name, patched(name, getattr(os, name)))
    builtins.open = patched("open", builtins.open)
    return made


class Killer:
    def __init__(self, job, source, folder):
        self.job, self.source, self.folder = job, source, folder
        self.kills, self.resumed, self.problems, self.names = 0, [], [], []

    def run(self, folder, point=0, how="before"):
        def work():
            made = die_at(point, how)
            result = JOBS[self.job](self.source, folder)
            return {"calls": made[:], "resumed_blocks": result.resumed_blocks if result else 0}

        return forked(work)

    def finish(self, folder, wanted, what):
        """What a kill left must not look finished unless it is, and an undisturbed rerun must end with `wanted`."""
        store = find_store(self.job, folder)
        if store is not None:
            try:
                Store.open(store)
                whole = {name: digest for name, digest in digests(store).items() if not name.endswith(".partial")}
                if whole != wanted:
                    self.problems.append(f"{what}: it can be opened and is not whole")
            except StoreError:
                pass
        code, answer = outcome(*self.run(folder))
        if code:
            self.problems.append(f"{what}: the rerun failed: {answer}")
            return
        found = digests(find_store(self.job, folder))
        if found != wanted:
            other = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
            self.problems.append(f"{what}: other bytes after the rerun: {other}")
        self.resumed.append(answer["resumed_blocks"])
        shutil.rmtree(folder)

    def die_at_calls(self, wanted, points, total, generator):
        """points: (number of the call, how to die at it)."""
        for number, (point, how) in enumerate(points):
            folder = self.folder / f"call-{number}"
            code, _ = outcome(*self.run(folder, point, how))
            self.kills += code == -signal.SIGKILL
            what = f"killed {how} call {point}"
            if number % 4 == 0:  # and the one that goes on is killed as well
                code, _ = outcome(*self.run(folder, generator.randint(1, total), how))
                self.kills += code == -signal.SIGKILL
                what += " and once more while it went on"
            self.finish(folder, wanted, what)

    def die_after_delays(self, wanted, rounds, seconds, generator):
        for number in range(rounds):
            folder = self.folder / f"delay-{number}"
            for kind in (signal.SIGTERM, signal.SIGKILL, signal.SIGHUP):
                child, pipe = self.run(folder)
                time.sleep(generator.uniform(0, seconds))
                os.kill(child, kind)
                code, _ = outcome(child, pipe)
                self.kills += code < 0
            self.finish(folder, wanted, f"delays of round {number}")


def cover(calls, generator):
    """A call of every kind for every way to die at it."""
    points = []
    for name in sorted(set(calls)):
        places = [number for number, call in enumerate(calls, start=1) if call == name]
        points += [(generator.choice(places), how) for how in ("before", "after", "half")[: 2 + (name in WRITES)]]
    return points


def storm(job, mode, source, folder, generator, more):
    killer = Killer(job, source, folder)
    outcome(*killer.run(folder / "warm"))
    started = time.perf_counter()
    code, answer = outcome(*killer.run(folder / "undisturbed"))
    seconds = time.perf_counter() - started
    assert code == 0, answer
    wanted, calls = digests(find_store(job, folder / "undisturbed")), answer["calls"]
    if mode == "calls":
        points = cover(calls, generator) if job == "repack" else []
        for number in range(more + FEW_POINTS):
            points.append((generator.randint(1, len(calls)), ("before", "after", "half")[number % 3]))
        killer.die_at_calls(wanted, points, len(calls), generator)
    else:
        killer.die_after_delays(wanted, FEW_ROUNDS + more, seconds, generator)
    return {
        "kills": killer.kills,
        "resumed_blocks": killer.resumed,
        "problems": killer.problems,
        "calls": sorted(set(calls)),
    }


def main(source, folder, seed, more):
    generator, found = random.Random(int(seed)), {}
    for job, mode in (("repack", "calls"), ("ensure", "calls"), ("repack", "delays")):
        place = Path(folder) / f"{job}-{mode}"
        place.mkdir()
        found[f"{job} {mode}"] = storm(job, mode, Path(source), place, generator, int(more))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
