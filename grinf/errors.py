"""Every failure that a user can meet, as what / why / what to do, with the exit code of the process."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes, the same for every command."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    ENVIRONMENT = 3
    REJECTED = 4
    GATE = 5
    UNTRUSTED = 6
    IO = 7
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143


class GrinfError(Exception):
    """A failure told in up to three lines.

    Args:
        what: What happened, with the offending value.
        why: The reason, where the first line does not say it.
        fix: What the user can do about it.
    """

    exit_code = ExitCode.UNEXPECTED

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what, why, fix)
        self.what, self.why, self.fix = what, why, fix

    def __str__(self) -> str:
        return "\n".join(line for line in (self.what, self.why, self.fix) if line)


class UsageError(GrinfError):
    """A flag, a setting, a configuration file or a column that cannot be used."""

    exit_code = ExitCode.USAGE


class DataError(GrinfError):
    """Content of an input file that is refused before any work starts."""

    exit_code = ExitCode.USAGE


class EnvironmentFault(GrinfError):
    """Something that the machine lacks, or a file that is missing or unreadable."""

    exit_code = ExitCode.ENVIRONMENT


class ModelError(EnvironmentFault):
    """A checkpoint that is missing, unreadable, or of a kind that grinf does not run."""


class TrieFileError(EnvironmentFault):
    """A trie file that is missing, corrupt, or does not belong to the model."""


class CapacityError(EnvironmentFault):
    """A request, a batch or a plan that the memory at hand can never hold."""


class KernelUnavailable(EnvironmentFault):
    """No implementation of an op fits this machine; lists each candidate and why it was rejected."""


class StorageError(GrinfError):
    """A read or write that the file system refused (disk full, permission, I/O error)."""

    exit_code = ExitCode.IO


class StoppedError(GrinfError):
    """A signal ended a job that can go on.

    Args:
        exit_code: That of the signal.
    """

    def __init__(self, exit_code: ExitCode, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what, why, fix)
        self.exit_code = exit_code


class RejectsError(GrinfError):
    """So many query rows are wrong that it is not the rows."""

    exit_code = ExitCode.REJECTED


class RowError(GrinfError):
    """One query row that cannot be served; it becomes an error row, never the end of the job.

    Args:
        code: Short machine-readable reason, such as `empty_input` or `overlong`.
    """

    exit_code = ExitCode.REJECTED

    def __init__(self, code: str, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what, why, fix)
        self.code = code

    def kept(self) -> "RowError":
        """A copy to be kept: one that was raised holds every object of the frames that it came through."""
        return RowError(self.code, self.what, self.why, self.fix)
