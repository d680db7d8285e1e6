"""Repacks that are killed, for tests/test_kills.py: one process that has imported everything forks them by the dozen.

    python kills.py JOB SOURCE FOLDER MODE SEED

JOB     repack (into FOLDER/n) or ensure (into the cache folder FOLDER/n)
MODE    calls: for each of the system calls a repack makes, one that dies before it, after it or half-way through it
        delays: killed again and again after random delays, by SIGKILL or SIGTERM, until one gets through
Prints one JSON document: {"kills", "resumed_blocks", "problems", "calls"}. A problem is whatever looked finished and
was not, or a rerun that failed or ended with other bytes than an undisturbed run.
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
POINTS = 32  # of the calls a run makes, spread over them


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
            if how == "half" and name in ("pwritev", "write", "pwrite"):
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

    def die_at_calls(self, wanted, total, generator):
        points = sorted(generator.sample(range(1, total + 1), min(POINTS, total)))
        for number, point in enumerate(points):
            folder = self.folder / f"call-{point}"
            how = ("before", "after", "half")[number % 3]
            code, answer = outcome(*self.run(folder, point, how))
            self.kills += code == -signal.SIGKILL
            what = f"killed {how} call {point}"
            if number % 4 == 0:  # and the one that goes on is killed as well
                code, answer = outcome(*self.run(folder, generator.randint(1, total), how))
                self.kills += code == -signal.SIGKILL
                what += " and once more while it went on"
            self.finish(folder, wanted, what)

    def die_after_delays(self, wanted, seconds, generator, rounds=8):
        for number in range(rounds):
            folder = self.folder / f"delay-{number}"
            for _ in range(generator.randint(1, 4)):
                child, pipe = self.run(folder)
                time.sleep(generator.uniform(0, seconds))
                os.kill(child, generator.choice([signal.SIGKILL, signal.SIGTERM]))
                code, _ = outcome(child, pipe)
                self.kills += code < 0
            self.finish(folder, wanted, f"delays of round {number}")


def main(job, source, folder, mode, seed):
    folder, generator = Path(folder), random.Random(int(seed))
    killer = Killer(job, Path(source), folder)
    outcome(*killer.run(folder / "warm"))
    started = time.perf_counter()
    code, answer = outcome(*killer.run(folder / "undisturbed"))
    seconds = time.perf_counter() - started
    assert code == 0, answer
    wanted = digests(find_store(job, folder / "undisturbed"))
    if mode == "calls":
        killer.die_at_calls(wanted, len(answer["calls"]), generator)
    else:
        killer.die_after_delays(wanted, seconds, generator)
    found = {
        "kills": killer.kills,
        "resumed_blocks": killer.resumed,
        "problems": killer.problems,
        "calls": sorted(set(answer["calls"])),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
