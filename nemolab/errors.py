"""What goes wrong for reasons a user can mend. Each is shown as one line; the class decides the exit code."""


class NemolabError(Exception):
    """Bad input, a failed check, a machine that lacks what was asked for: one clear line on stderr, exit code 1."""


class CheckpointError(NemolabError):
    """A checkpoint folder, config or shard that is not what its form promises."""


class StoreError(NemolabError):
    """A store that is missing, unfinished, foreign or damaged, or a read that failed."""


class EngineError(NemolabError):
    """The engine cannot run as asked: too little memory, a closed engine, a text too long."""


class TraceError(NemolabError):
    """A routing trace that is not what its form promises, or one that cannot answer what is asked of it."""


class UsageError(NemolabError):
    """The words of a call are off, on whatever machine: exit code 2."""
